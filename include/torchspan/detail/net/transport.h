#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/secret.h>

namespace torchspan::net {

/// One received message: a header of the sender's making and its segments, each in memory of its own.
struct Message {
  Bytes header;
  std::vector<Buffer> segments;
};

/// A connection to one peer. Messages arrive whole, once and in order, or not at all. send() and close() are
/// for any thread; a Channel is shared between its transport and whoever holds it.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Takes a message. When it returns, every borrowed segment (one without `keep`) has been written or copied
  /// and may be overwritten. Never calls back and never waits for the peer: what the wire does not take at
  /// once is queued. Throws Error: kDisconnected after the channel closed, kOverloaded when more than
  /// TransportOptions::max_unsent bytes are queued, kInvalid for a message beyond the limits; then nothing of
  /// it is sent.
  virtual void send(BytesView header, std::span<const Segment> segments) = 0;
  /// Bytes queued and not yet taken by the wire.
  virtual std::size_t unsent_bytes() const = 0;
  /// Delivers what was sent before, then closes. The handler hears on_closed once, from poll(), when the peer
  /// has taken note (or did not for TransportOptions::linger); messages under way may still arrive before
  /// that.
  virtual void close() = 0;
  /// The peer as it is named in messages to people, e.g. "unix:/run/…/worker1" or "tcp:127.0.0.1:29500".
  virtual std::string peer() const = 0;
};

/// What a transport tells its owner, only ever from inside Transport::poll() and never two at a time. A
/// callback may send(), close() and connect(); it must not throw and must not destroy the transport.
class Handler {
 public:
  virtual ~Handler() = default;
  /// A peer dialled us and proved that it knows the secret.
  virtual void on_accepted(const std::shared_ptr<Channel>& channel) = 0;
  virtual void on_message(const std::shared_ptr<Channel>& channel, Message message) = 0;
  /// The last word of every channel, made or accepted: kDisconnected (nobody there, peer gone, or closed by
  /// either side), kTimedOut (connecting or its handshake), kDenied (wrong secret or user), kInvalid (the
  /// peer broke the protocol), kUnsupported (it speaks another version), kOverloaded (no descriptor or memory
  /// left here).
  virtual void on_closed(const std::shared_ptr<Channel>& channel, const Error& reason) = 0;
  /// Somebody who dialled us was turned away before there was a channel, for one of on_closed's reasons:
  /// worth a line in the log, nothing else.
  virtual void on_refused(const std::string& /*peer*/, const Error& /*reason*/) {}
};

struct TransportOptions {
  Secret secret;  ///< both sides prove it before the first message
  /// Where segments are received. A transport may hand over memory of its own instead as long as it is this
  /// one.
  BufferAllocator allocator = allocate_buffer;
  std::uint64_t max_header = std::uint64_t{1} << 30;   ///< bytes of one message's header
  std::uint64_t max_message = std::uint64_t{1} << 40;  ///< bytes of one message in all
  std::uint32_t max_segments = 1u << 20;               ///< segments of one message
  std::uint64_t max_unsent = std::uint64_t{8} << 30;   ///< bytes queued per channel
  /// Accepted connections that have not proved the secret. While there are as many and others wait, the one
  /// that came first has only a tenth of a second.
  std::uint32_t max_unauthenticated = 128;
  Duration handshake_timeout = std::chrono::seconds(5);
  Duration linger = std::chrono::seconds(5);  ///< how long a closed channel waits for the peer to take note
};

/// A way to reach peers. poll() and wait() are called by one thread at a time, whoever holds the right to
/// drive; all else is for any thread. Destroying it closes every channel without further callbacks.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Starts to accept peers. `address` names the kind and place, e.g. "unix:/path", "tcp:127.0.0.1:0" (0: any
  /// free port) or "sim:name"; returns the address that peers dial. Throws kInvalid (bad address, in use).
  virtual std::string listen(const std::string& address) = 0;
  /// Whether this transport knows how to dial `address`.
  virtual bool can_reach(const std::string& address) const = 0;
  /// Dials. Returns at once; send() may be called right away and is queued until the handshake is done;
  /// failure arrives as on_closed, kDisconnected when no worker listens there (yet: dial again). The deadline
  /// covers the handshake. Throws kInvalid for an address that cannot be read, kUnsupported for one that this
  /// transport may not dial.
  virtual std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) = 0;

  /// Dispatches everything that is ready, without waiting. True when there was anything.
  virtual bool poll() = 0;
  /// Sleeps until poll() may have work, until wake(), or until the deadline.
  virtual void wait(Deadline deadline) = 0;
  /// Ends the current wait(), or the next one. From any thread.
  virtual void wake() = 0;
};

}  // namespace torchspan::net
