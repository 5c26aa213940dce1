#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <sys/types.h>
#include <sys/uio.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan::net {

/// Copies segments into memory that the peer can adopt. Thread-safe; may be used after its connection ended.
class Lender {
 public:
  virtual ~Lender() = default;
  /// Copies `segment` into a block and returns its number; 0 if the segment must be sent as bytes.
  virtual std::uint64_t lend(const Segment& segment) = 0;
  /// The block was not sent.
  virtual void take_back(std::uint64_t block) = 0;
};

/// A path for a connection's bytes that is faster than the socket; both sides agree on it after the
/// handshake. The socket stays and reports the peer's death. Methods are for the driver unless they say
/// otherwise; if one throws, the connection ends with that error.
class Lane {
 public:
  enum class Outcome : std::uint8_t { kUnsettled, kOpen, kDeclined };

  virtual ~Lane() = default;
  /// Starts to negotiate with the peer over `socket`, which outlives the lane.
  virtual void begin(int socket) = 0;
  /// Continues the negotiation; call it when the socket is readable. Reads no byte that belongs to frames.
  virtual Outcome settle() = 0;

  /// Handles what the peer sent over the socket; returns whether the socket has ended.
  virtual bool read_notes() = 0;
  /// Received bytes that are not consumed, or the first of them. The peer can change them at any time: read
  /// each byte once. Throws kInvalid if the peer broke the lane.
  virtual BytesView readable() = 0;
  virtual void consume(std::size_t size) = 0;
  /// The most bytes that can be readable at once.
  virtual std::size_t capacity() const = 0;
  /// A lent segment, as memory that only this side uses.
  virtual Buffer adopt(std::uint64_t block, std::size_t size) = 0;

  /// Announces to the peer that this side is going to sleep; returns false if there is work first. `unsent`:
  /// bytes wait for room.
  virtual bool prepare_sleep(bool unsent) = 0;
  virtual void end_sleep() = 0;
  /// Returns idle memory to the system; returns when to call again.
  virtual Deadline tidy(TimePoint now) = 0;

  /// Returns the number of bytes written, 0 without room, -1 if the peer broke the lane; readable() then
  /// throws. For any thread, one at a time.
  virtual ssize_t write(std::span<const iovec> places) = 0;
  /// Segments from this size on are worth lending.
  virtual std::size_t lend_from() const = 0;
  virtual std::shared_ptr<Lender> lender() const = 0;
};

}  // namespace torchspan::net
