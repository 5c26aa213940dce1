#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>

#include "net/framing.h"
#include "net/stream/outbox.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_session.h"

namespace torchspan::net {

struct TlsRequest;
using TlsRequestQueue = RequestQueue<TlsRequest>;

/// The sending half of a channel over one or more TLS connections. Thread-safe. Encrypts and writes in the
/// calling thread as long as nothing is queued; the driver flushes the rest.
class TlsChannel final : public Channel {
 public:
  struct Options {
    std::string peer;
    std::uint64_t token;  ///< the channel's, for the request queue
    FrameLimits limits;
    std::uint64_t max_unsent;
  };
  TlsChannel(Options options, std::shared_ptr<TlsRequestQueue> request_queue);

  void send(BytesView header, std::span<const Segment> segments) override;
  std::size_t unsent_bytes() const override { return unsent_.load(std::memory_order_relaxed); }
  bool opened() const override { return opened_.load(std::memory_order_acquire); }
  void close() override;
  std::string peer() const override { return options_.peer; }

  /// What the driver reviews after every event.
  struct State {
    std::uint32_t flushing = 0;         ///< a bit for each lane whose bytes wait for room in the socket
    bool closing = false;               ///< close() was called
    bool said_goodbye = false;          ///< and the system accepted the goodbye and all bytes before it
    std::optional<std::string> broken;  ///< why nothing more can be written
  };
  /// The peer proved itself: sends what is queued over `first`, and lets send() write to it.
  void open(std::shared_ptr<TlsSession> first);
  /// Adds a connection for pieces; returns its bit in State::flushing.
  std::size_t add_lane(std::shared_ptr<TlsSession> lane);
  /// Sends queued bytes as far as the sockets have room.
  void flush();
  /// Between these calls, small messages are queued and sent together.
  void cork() override;
  void uncork() override;
  /// Sends a heartbeat unless bytes were sent since the last call or are queued.
  void beat();
  State state() const;
  /// The channel has ended: later calls of send() throw `reason`.
  void end(const Error& reason);

 private:
  struct Lane {
    std::shared_ptr<TlsSession> session;
    Outbox outbox;
    /// Whether bytes can be sent now, or once the socket has room.
    bool can_flush() const { return session && (outbox.ready() || session->unsent() != 0); }
    bool idle() const { return session && outbox.empty() && session->unsent() == 0; }
    std::size_t waiting() const { return outbox.size() + (session ? session->unsent() : 0); }
  };
  std::uint64_t waiting_locked() const TORCHSPAN_REQUIRES(mutex_);
  bool may_hold(std::uint64_t size) const TORCHSPAN_REQUIRES(mutex_);
  void flush_locked(Released& released) TORCHSPAN_REQUIRES(mutex_);
  void flush_lane(Lane& lane, Released& released) TORCHSPAN_REQUIRES(mutex_);
  /// What one send() leaves to do after it released the lock.
  struct Afterwards {
    LateCopies late;
    Released released;
  };
  /// Writes as far as the lane has room and queues the rest.
  void put(std::size_t lane, Outgoing& bytes, Afterwards& afterwards) TORCHSPAN_REQUIRES(mutex_);
  void stripe(std::span<const Segment> segments, Afterwards& afterwards) TORCHSPAN_REQUIRES(mutex_);
  void copy_late(Afterwards& afterwards);
  std::size_t emptiest_lane() TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void break_without_memory(Released& released) TORCHSPAN_REQUIRES(mutex_);
  void note_unsent() TORCHSPAN_REQUIRES(mutex_);
  void break_locked(const std::string& why, Released& released) TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void throw_ended() const TORCHSPAN_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<TlsRequestQueue> request_queue_;
  std::atomic<std::size_t> unsent_{0};
  std::atomic<bool> opened_{false};
  mutable Mutex mutex_;
  std::vector<Lane> lanes_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< the first always exists, perhaps without session
  std::uint64_t striped_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< striped messages so far
  bool corked_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool closing_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool wrote_ TORCHSPAN_GUARDED_BY(mutex_) = false;             ///< since the last beat()
  std::uint64_t direct_left_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< bytes this send() may still write itself
  std::optional<std::string> broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<std::string> ended_ TORCHSPAN_GUARDED_BY(mutex_);  ///< why the channel ended
};

/// Makes a channel with the limits of `options`.
std::shared_ptr<TlsChannel> make_tls_channel(std::string peer, std::uint64_t token,
                                             const TransportOptions& options,
                                             std::shared_ptr<TlsRequestQueue> request_queue);

/// A request of another thread to the TlsDriver.
struct TlsRequest {
  /// Make a channel by dialing `place`.
  struct Dial {
    std::shared_ptr<TlsChannel> channel;
    TlsPlace place;
    Deadline deadline;
    std::vector<Address> addresses;  ///< empty while the name is being looked up
  };
  /// The look-up of the host of the channel with this token has ended.
  struct Resolved {
    std::vector<Address> addresses;
    std::optional<Error> failure;
  };
  std::uint64_t token;
  std::optional<Dial> dial = {};
  std::optional<Resolved> resolved = {};
};

}  // namespace torchspan::net
