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

namespace torchspan::net {

/// The sending half of a connection. Thread-safe. Writes to the socket in the calling thread as long as
/// nothing is queued; the driver flushes the rest. The driver's Connection owns the socket and calls end()
/// before it closes it.
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
  bool opened() const override { return opened_.load(std::memory_order_acquire); }
  /// Whether queued bytes can be sent now: no other thread still copies the first of them.
  bool can_flush() const { return can_flush_.load(std::memory_order_relaxed); }
  void close() override;
  std::string peer() const override { return options_.peer; }

  /// What the driver reviews after every event.
  struct State {
    bool flushing = false;              ///< bytes wait for room in the socket
    bool closing = false;               ///< close() was called
    bool said_goodbye = false;          ///< and the system accepted the goodbye
    std::optional<std::string> broken;  ///< why the socket cannot be written
  };
  /// The peer proved itself: sends what is queued, and lets send() write to `lane` if there is one, else to
  /// `socket`. Both are used until end().
  State open(int socket, Lane* lane);
  /// Sends queued bytes as far as the socket has room.
  State flush();
  /// Between these calls, small messages are queued and sent together: replies to messages that arrived
  /// together.
  void cork() override;
  void uncork() override;
  State state() const;
  /// The channel has ended: later calls of send() throw `reason`.
  void end(const Error& reason);

 private:
  class Lending;

  std::shared_ptr<Lender> lender_for(std::span<const Segment> segments) const;
  void send_locked(Outgoing& message, std::uint64_t size, LateCopies& late, Released& released)
      TORCHSPAN_REQUIRES(mutex_);
  ssize_t put_locked(std::span<iovec> places) TORCHSPAN_REQUIRES(mutex_);
  State state_locked() const TORCHSPAN_REQUIRES(mutex_);
  bool may_hold(std::uint64_t size) const TORCHSPAN_REQUIRES(mutex_);
  void flush_locked(Released& released) TORCHSPAN_REQUIRES(mutex_);
  void write_locked(Outgoing& message, Released& released) TORCHSPAN_REQUIRES(mutex_);
  void queue_locked(const Outgoing& message, LateCopies& late, Released& released) TORCHSPAN_REQUIRES(mutex_);
  void copy_late(LateCopies& late);
  void note_unsent() TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void break_without_memory(Released& released) TORCHSPAN_REQUIRES(mutex_);
  void break_locked(const std::string& why, Released& released) TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void throw_ended() const TORCHSPAN_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<StreamRequestQueue> request_queue_;
  std::atomic<std::size_t> unsent_{0};
  std::atomic<bool> can_flush_{false};
  std::atomic<bool> opened_{false};
  std::atomic<std::size_t> lend_from_;  ///< larger than any segment while there is no lane
  mutable Mutex mutex_;
  int socket_ TORCHSPAN_GUARDED_BY(mutex_) = -1;  ///< -1 until open() and after end()
  Lane* lane_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::shared_ptr<Lender> lender_ TORCHSPAN_GUARDED_BY(mutex_);
  Outbox outbox_ TORCHSPAN_GUARDED_BY(mutex_);
  bool corked_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool closing_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<std::string> broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<std::string> ended_ TORCHSPAN_GUARDED_BY(mutex_);  ///< why the channel ended
};

}  // namespace torchspan::net
