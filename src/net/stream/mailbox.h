#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/core/executor.h>
#include <torchspan/core/mutex.h>

#include "net/stream/socket.h"

namespace torchspan::net {

class Connection;

/// What other threads ask of the thread that drives a stream transport. Outlives the transport with its
/// channels: what is posted then goes nowhere.
class Mailbox {
 public:
  struct Requests {
    std::vector<std::unique_ptr<ListeningSocket>> listeners;
    std::vector<std::unique_ptr<Connection>> connections;
    std::vector<std::uint64_t> reviews;  ///< connections whose channel has something for the driver
  };
  explicit Mailbox(Poller& poller);
  ~Mailbox();

  void post(std::unique_ptr<ListeningSocket> listener);
  void post(std::unique_ptr<Connection> connection);
  void post_review(std::uint64_t token);

  bool pending() const { return pending_.load(std::memory_order_acquire); }
  Requests take();
  /// The poller is going away. Returns what was never taken.
  Requests close();

 private:
  void announce() TORCHSPAN_REQUIRES(mutex_);

  Mutex mutex_;
  Poller* poller_ TORCHSPAN_GUARDED_BY(mutex_);
  Requests requests_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<bool> pending_{false};
};

}  // namespace torchspan::net
