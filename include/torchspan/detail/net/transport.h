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

/// A received message: the sender's header and segments, each in separate memory.
struct Message {
  Bytes header;
  std::vector<Buffer> segments;
};

/// A connection to one peer. Messages are delivered whole, once and in order, or not at all. send() and
/// close() are thread-safe. The transport and its users share ownership.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Sends a message. On return, borrowed segments (without `keep`) may be reused. Never calls back and
  /// never waits for the peer: unsent data is queued. Throws Error and sends nothing: kDisconnected after
  /// the channel closed, kOverloaded beyond TransportOptions::max_unsent queued bytes, kInvalid for a
  /// message beyond the limits.
  virtual void send(BytesView header, std::span<const Segment> segments) = 0;
  /// Queued bytes not yet sent.
  virtual std::size_t unsent_bytes() const = 0;
  /// Whether the peer has proved itself, even if the channel has ended since. If not, no message has reached it.
  virtual bool opened() const { return true; }
  /// Sends what is queued, then closes. poll() reports on_closed once, when the peer has acknowledged or
  /// after TransportOptions::linger; incoming messages may still arrive before that.
  virtual void close() = 0;
  /// Whether segments may be in device memory here, which arrive in device memory if the peer's channel carries it, too.
  virtual bool carries_device_memory() const { return false; }
  /// From cork() to uncork(), small messages may be collected and are then sent together.
  virtual void cork() {}
  virtual void uncork() {}
  /// The peer's address in messages, e.g. "unix:/run/…/worker1" or "tcp:127.0.0.1:29500".
  virtual std::string peer() const = 0;
};

/// Events of a transport. Called only inside Transport::poll(), one at a time. A callback may send(),
/// close() and connect(); it must not throw and must not destroy the transport.
class Handler {
 public:
  virtual ~Handler() = default;
  /// A peer connected and proved that it knows the secret.
  virtual void on_accepted(const std::shared_ptr<Channel>& channel) = 0;
  virtual void on_message(const std::shared_ptr<Channel>& channel, Message message) = 0;
  /// Memory for a segment with this Segment::device_target. No work that the device has been given may use it. Without
  /// `data`, the segment goes to host memory. May throw Error: the channel ends with it.
  virtual Buffer device_memory(const std::shared_ptr<Channel>& /*channel*/, std::uint32_t /*target*/,
                               std::size_t /*size*/) {
    return {};
  }
  /// Last event of every channel: kDisconnected (no listener, peer died, or closed by either side),
  /// kTimedOut (connecting or handshake), kDenied (wrong secret or user), kInvalid (protocol violation by
  /// the peer), kUnsupported (protocol version), kOverloaded (out of descriptors or memory here).
  virtual void on_closed(const std::shared_ptr<Channel>& channel, const Error& reason) = 0;
  /// An incoming connection was rejected before it became a channel, for one of on_closed's reasons. Log it
  /// only.
  virtual void on_refused(const std::string& /*peer*/, const Error& /*reason*/) {}
};

/// Segment::device_target is less than this.
inline constexpr std::uint32_t kDeviceTargets = 1u << 24;

/// What the memory of a worker's devices is to a transport.
enum class DeviceMemoryKind : std::uint8_t {
  kNone,  ///< there are no devices whose memory it may carry
  kCuda,
  kHost,  ///< host memory, in tests
};

struct TransportOptions {
  Secret secret;  ///< proved by both sides before the first message
  /// Allocates memory for received segments. A transport may use its own memory only with the default.
  BufferAllocator allocator = allocate_buffer;
  /// Segments in such memory may be sent over channels that carry it: those of UCX, if UCX supports it, and of `sim`.
  DeviceMemoryKind device_memory = DeviceMemoryKind::kNone;
  std::uint64_t max_header = std::uint64_t{1} << 30;   ///< bytes per message header
  std::uint64_t max_message = std::uint64_t{1} << 40;  ///< bytes per message
  std::uint32_t max_segments = 1u << 20;               ///< segments per message
  std::uint64_t max_unsent = std::uint64_t{8} << 30;   ///< queued bytes per channel
  /// Maximum number of accepted connections from unauthenticated peers. When it is reached and others are
  /// queued, the oldest handshake's timeout is shortened to 100 ms.
  std::uint32_t max_unauthenticated = 128;
  Duration handshake_timeout = std::chrono::seconds(5);
  Duration linger = std::chrono::seconds(5);  ///< wait for the peer to acknowledge a close
};

/// A way to reach peers. One thread at a time, which holds the right to drive, calls poll() and wait();
/// everything else is thread-safe. The destructor closes every channel without callbacks.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Starts to accept peers. `address` is a kind and a place, e.g. "unix:/path", "tcp:127.0.0.1:0" (0: any
  /// free port) or "sim:name". Returns the address to dial. Throws kInvalid (bad address, in use).
  virtual std::string listen(const std::string& address) = 0;
  /// Whether this transport can dial `address`.
  virtual bool can_reach(const std::string& address) const = 0;
  /// Dials and returns at once; messages are queued until the handshake is done. Failure is reported as
  /// on_closed: kDisconnected if there is no listener (it may come up later: retry). The deadline covers
  /// the handshake. Throws kInvalid for a malformed address, kUnsupported for one that this transport may
  /// not dial.
  virtual std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) = 0;

  /// Dispatches all ready events without waiting; true if there were any.
  virtual bool poll() = 0;
  /// Sleeps until poll() may have work, until wake(), or until the deadline.
  virtual void wait(Deadline deadline) = 0;
  /// Ends the current or the next wait(). Thread-safe.
  virtual void wake() = 0;
};

}  // namespace torchspan::net
