#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>

#include "net/framing.h"
#include "net/stream/lane.h"
#include "net/stream/outbox.h"
#include "net/stream/request_queue.h"

namespace torchspan::net {

/// The sending half of a connection, shared by all threads. Writes to the socket from the calling thread as
/// long as nothing is queued; the driver flushes the rest. The socket belongs to the driver's Connection,
/// which takes it away with end().
class StreamChannel final : public Channel {
 public:
  struct Options {
    std::string peer;
    std::uint64_t token;  ///< the connection's, for the request queue
    FrameLimits limits;
    std::uint64_t max_unsent;
  };
  StreamChannel(Options options, std::shared_ptr<StreamRequestQueue> request_queue);

  void send(BytesView header, std::span<const Segment> segments) override;
  std::size_t unsent_bytes() const override { return unsent_.load(std::memory_order_relaxed); }
  void close() override;
  std::string peer() const override { return options_.peer; }

  /// What the driver has to know after every event.
  struct State {
    bool flushing = false;              ///< bytes wait for room in the socket
    bool closing = false;               ///< close() was called
    bool said_goodbye = false;          ///< and the goodbye is with the system
    std::optional<std::string> broken;  ///< why the socket takes no more
  };
  /// The peer is proven: sends what was queued and lets send() write to `lane` if there is one, else to
  /// `socket`. Both are used until end().
  State open(int socket, Lane* lane);
  /// Sends what the socket takes.
  State flush();
  /// Between these two, small messages are queued and leave together: for the replies to messages that came
  /// together.
  void cork();
  void uncork();
  State state() const;
  /// Nothing more goes through; `reason` is what later callers of send() are told.
  void end(const Error& reason);

 private:
  class Lending;

  std::shared_ptr<Lender> lender_for(std::span<const Segment> segments) const;
  ssize_t put_locked(std::span<iovec> places) TORCHSPAN_REQUIRES(mutex_);
  State state_locked() const TORCHSPAN_REQUIRES(mutex_);
  bool may_hold(std::uint64_t size) const TORCHSPAN_REQUIRES(mutex_);
  void flush_locked(Released& released) TORCHSPAN_REQUIRES(mutex_);
  void write_locked(Outgoing& message, Released& released) TORCHSPAN_REQUIRES(mutex_);
  void queue_locked(const Outgoing& message, Released& released) TORCHSPAN_REQUIRES(mutex_);
  void break_locked(const std::string& why, Released& released) TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void throw_ended() const TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void throw_overloaded(std::uint64_t size) const TORCHSPAN_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<StreamRequestQueue> request_queue_;
  std::atomic<std::size_t> unsent_{0};
  std::atomic<std::size_t> lend_from_;  ///< no segment is that large while there is no lane
  mutable Mutex mutex_;
  int socket_ TORCHSPAN_GUARDED_BY(mutex_) = -1;  ///< -1 until open() and after end()
  Lane* lane_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::shared_ptr<Lender> lender_ TORCHSPAN_GUARDED_BY(mutex_);
  Outbox outbox_ TORCHSPAN_GUARDED_BY(mutex_);
  bool corked_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool closing_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<std::string> broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<std::string> ended_ TORCHSPAN_GUARDED_BY(mutex_);  ///< why nothing goes through any more
};

}  // namespace torchspan::net
