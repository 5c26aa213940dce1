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

/// Copies segments into memory that the peer can adopt. Thread-safe, and usable after its connection ended.
class Lender {
 public:
  virtual ~Lender() = default;
  /// The number of a block that now holds a copy of `segment`, or 0: send it as bytes then.
  virtual std::uint64_t lend(const Segment& segment) = 0;
  /// The block was not sent after all.
  virtual void take_back(std::uint64_t block) = 0;
};

/// A faster way than the socket for a connection's bytes, which both sides agree on after the handshake. The
/// socket stays: it tells of the peer's death. Methods belong to the driver unless they say otherwise;
/// errors are what the connection ends with.
class Lane {
 public:
  enum class Outcome : std::uint8_t { kUnsettled, kOpen, kDeclined };

  virtual ~Lane() = default;
  /// Begins to settle with the peer over `socket`, which outlives the lane.
  virtual void begin(int socket) = 0;
  /// Goes on settling; call when the socket is readable. Takes no byte that belongs to frames.
  virtual Outcome settle() = 0;

  /// Works off what the peer left on the socket; true when the socket has ended.
  virtual bool read_notes() = 0;
  /// Bytes that came and are not consumed, or the first of them. The peer can change them at any time: read
  /// each once. Throws kInvalid when the peer broke the lane.
  virtual BytesView readable() = 0;
  virtual void consume(std::size_t size) = 0;
  /// Most bytes that can be readable at once.
  virtual std::size_t capacity() const = 0;
  /// The bytes of a lent segment as memory of this side's own.
  virtual Buffer adopt(std::uint64_t block, std::size_t size) = 0;

  /// Tells the peer that this side is going to sleep; false when there is something to do first. `unsent`:
  /// bytes wait for room.
  virtual bool prepare_sleep(bool unsent) = 0;
  virtual void end_sleep() = 0;
  /// Gives memory that lies idle back to the system; returns when to come again.
  virtual Deadline tidy(TimePoint now) = 0;

  /// Bytes taken, 0 when there is no room, -1 when the peer broke the lane, as readable() will tell. One
  /// thread at a time, any thread.
  virtual ssize_t write(std::span<const iovec> places) = 0;
  /// Segments from this size on are worth lending.
  virtual std::size_t lend_from() const = 0;
  virtual std::shared_ptr<Lender> lender() const = 0;
};

}  // namespace torchspan::net
