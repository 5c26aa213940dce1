#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <sys/uio.h>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>
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

  void post(std::unique_ptr<ListeningSocket> listener) { post(&Requests::listeners, std::move(listener)); }
  void post(std::unique_ptr<Dialed> connection) { post(&Requests::connections, std::move(connection)); }
  void post_review(std::uint64_t token) { post(&Requests::reviews, token); }

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
  template <class Request>
  void post(std::vector<Request> Requests::*list, Request request) {
    MutexLock lock(mutex_);
    if (poller_ == nullptr) return;
    (requests_.*list).push_back(std::move(request));
    if (!pending_.exchange(true, std::memory_order_release)) poller_->wake();
  }

  Mutex mutex_;
  Poller* poller_ TORCHSPAN_GUARDED_BY(mutex_);
  Requests requests_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<bool> pending_{false};
};

class Connection;
using StreamRequestQueue = RequestQueue<Connection>;

/// Owners of memory that is no longer needed. The caller destroys them after it released its lock, because
/// that may run a destructor of the user.
using Released = std::vector<std::shared_ptr<const void>>;

/// Unsent bytes, in order. Small pieces share chunks, so that one call sends many small messages. Not
/// thread-safe.
class Outbox {
 public:
  /// Copies `bytes`.
  void copy(BytesView bytes);
  /// Refers to `bytes` if they are large and `keep` holds them; copies them otherwise.
  void add(BytesView bytes, const std::shared_ptr<const void>& keep);
  /// Reserves a place for `size` bytes that fill() provides later; all bytes behind it wait. Extends the place `last` if
  /// nothing was queued after it. Returns the place's number, which is never 0.
  std::uint64_t reserve(std::size_t size, std::uint64_t last);
  /// Does nothing if the place was dropped by clear().
  void fill(std::uint64_t place, const Buffer& bytes);

  bool empty() const { return size_ == 0; }
  /// Whether the first bytes can be sent: they are not a place that waits for fill().
  bool ready() const { return !chunks_.empty() && chunks_.front().data != nullptr; }
  std::size_t size() const { return size_; }
  /// Fills in the first bytes that can be sent; returns the number of places used.
  std::size_t front(std::span<iovec> places) const;
  /// Drops the first `size` bytes.
  void consume(std::size_t size, Released& released);
  void clear(Released& released);

 private:
  struct Chunk {
    std::byte* data;  ///< null until fill()
    std::size_t size;
    std::size_t room;  ///< bytes that may still be appended; 0 for referenced memory
    std::shared_ptr<const void> keep;
  };
  std::deque<Chunk> chunks_;
  std::uint64_t first_ = 1;  ///< the number of the first chunk
  std::size_t size_ = 0;
};

/// Bytes of the caller that are in reserved places of outboxes, and are copied after the channel's lock is released: the
/// copy of a gigabyte takes a second, and the thread that receives needs the lock.
class LateCopies {
 public:
  bool empty() const { return copies_.empty(); }
  /// Reserves a place for `bytes` in `outbox`, the one with the number `index` of the channel.
  void add(Outbox& outbox, std::size_t index, BytesView bytes);
  /// Copies all bytes. Call it without the lock. Throws if there is no memory.
  void make();
  /// Puts the copies of the outbox with the number `index` into their places.
  void fill(Outbox& outbox, std::size_t index) const;

 private:
  struct Copy {
    std::size_t outbox;
    std::uint64_t place;
    std::vector<BytesView> parts;
    std::size_t size;
    Buffer bytes;
  };
  std::vector<Copy> copies_;
};

/// A message that is being sent: prefix, header and segments as one sequence of bytes with a position.
/// Borrows all of them.
class Outgoing {
 public:
  Outgoing(BytesView prefix, BytesView header, std::span<const Segment> segments)
      : prefix_(prefix), header_(header), segments_(segments) {}

  bool done() const { return piece_ == count(); }
  std::size_t front(std::span<iovec> places) const;
  void consume(std::size_t size);
  /// Appends everything from the position on to `outbox`. Leaves more than a few borrowed bytes to `late`; they must stay
  /// until LateCopies::make(), except a small prefix.
  void queue_rest(Outbox& outbox, LateCopies& late, std::size_t index = 0) const;

 private:
  std::size_t count() const { return segments_.size() + 2; }
  BytesView piece(std::size_t index) const;
  bool is_kept(std::size_t index) const;

  const BytesView prefix_;
  const BytesView header_;
  const std::span<const Segment> segments_;
  std::size_t piece_ = 0;
  std::size_t offset_ = 0;
};

}  // namespace torchspan::net
