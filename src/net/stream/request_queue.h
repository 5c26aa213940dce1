#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

#include "net/stream/socket.h"

namespace torchspan::net {

/// Requests of other threads to the driver of a transport over sockets: to listen, to take over a `Dialed`,
/// to review a connection. Channels may keep it after the end of the transport; it then drops what is posted.
/// Thread-safe.
template <class Dialed>
class RequestQueue {
 public:
  struct Requests {
    std::vector<std::unique_ptr<ListeningSocket>> listeners;
    std::vector<std::unique_ptr<Dialed>> connections;
    std::vector<std::uint64_t> reviews;  ///< connections whose channel has work for the driver
  };
  explicit RequestQueue(Poller& poller) : poller_(&poller) {}

  void post(std::unique_ptr<ListeningSocket> listener) {
    MutexLock lock(mutex_);
    if (poller_ == nullptr) return;
    requests_.listeners.push_back(std::move(listener));
    announce();
  }
  void post(std::unique_ptr<Dialed> connection) {
    MutexLock lock(mutex_);
    if (poller_ == nullptr) return;
    requests_.connections.push_back(std::move(connection));
    announce();
  }
  void post_review(std::uint64_t token) {
    MutexLock lock(mutex_);
    if (poller_ == nullptr) return;
    requests_.reviews.push_back(token);
    announce();
  }

  bool pending() const { return pending_.load(std::memory_order_acquire); }
  Requests take() {
    MutexLock lock(mutex_);
    pending_.store(false, std::memory_order_relaxed);
    return std::exchange(requests_, {});
  }
  /// Call it before the poller is destroyed. Returns the requests that were not taken.
  Requests close() {
    MutexLock lock(mutex_);
    poller_ = nullptr;
    return std::exchange(requests_, {});
  }

 private:
  void announce() TORCHSPAN_REQUIRES(mutex_) {
    if (!pending_.exchange(true, std::memory_order_release)) poller_->wake();
  }

  Mutex mutex_;
  Poller* poller_ TORCHSPAN_GUARDED_BY(mutex_);
  Requests requests_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<bool> pending_{false};
};

class Connection;
using StreamRequestQueue = RequestQueue<Connection>;

}  // namespace torchspan::net
