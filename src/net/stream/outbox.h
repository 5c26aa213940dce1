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

/// Owners of memory that is no longer needed. They are handed out instead of dropped because dropping may run
/// a user's destructor, which must not happen under a lock.
using Released = std::vector<std::shared_ptr<const void>>;

/// Bytes that the wire did not take yet, in order. Small pieces share chunks, so that many small messages
/// leave in one call. Not thread-safe.
class Outbox {
 public:
  /// Copies `bytes`.
  void copy(BytesView bytes);
  /// Takes `bytes` by reference when they are worth it and `keep` holds them; copies them otherwise.
  void add(BytesView bytes, const std::shared_ptr<const void>& keep);

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  /// Fills in what is first; returns how many places were used.
  std::size_t front(std::span<iovec> places) const;
  /// Drops the first `size` bytes.
  void consume(std::size_t size, Released& released);
  void clear(Released& released);

 private:
  struct Chunk {
    std::byte* data;
    std::size_t size;
    std::size_t room;  ///< bytes that may still be appended; 0 for memory of others
    std::shared_ptr<const void> keep;
  };
  std::deque<Chunk> chunks_;
  std::size_t size_ = 0;
};

/// A message on its way: prefix, header and segments as one row of bytes with a position. Borrows everything.
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
