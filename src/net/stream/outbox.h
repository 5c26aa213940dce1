#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <sys/uio.h>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan::net {

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

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  /// Fills in the first bytes; returns the number of places used.
  std::size_t front(std::span<iovec> places) const;
  /// Drops the first `size` bytes.
  void consume(std::size_t size, Released& released);
  void clear(Released& released);

 private:
  struct Chunk {
    std::byte* data;
    std::size_t size;
    std::size_t room;  ///< bytes that may still be appended; 0 for referenced memory
    std::shared_ptr<const void> keep;
  };
  std::deque<Chunk> chunks_;
  std::size_t size_ = 0;
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
  /// Appends everything from the position on to `outbox`.
  void queue_rest(Outbox& outbox) const;

 private:
  std::size_t count() const { return segments_.size() + 2; }
  BytesView piece(std::size_t index) const;

  const BytesView prefix_;
  const BytesView header_;
  const std::span<const Segment> segments_;
  std::size_t piece_ = 0;
  std::size_t offset_ = 0;
};

}  // namespace torchspan::net
