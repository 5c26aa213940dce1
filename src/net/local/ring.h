#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <sys/uio.h>

#include <torchspan/core/bytes.h>

#include "net/handshake.h"
#include "net/local/memory.h"

namespace torchspan::net {

/// A byte ring for one producer and one consumer in memory that both map. Its first page:
struct RingHeader {
  std::array<std::byte, kNonceBytes> nonce;                ///< proves that both see the same memory
  alignas(64) std::atomic<std::uint64_t> tail;             ///< bytes ever written; the producer's
  alignas(64) std::atomic<std::uint64_t> head;             ///< bytes ever consumed; the consumer's
  alignas(64) std::atomic<std::uint32_t> consumer_sleeps;  ///< and wants to be woken for bytes
  alignas(64) std::atomic<std::uint32_t> producer_waits;   ///< and wants to be woken for room
};
inline constexpr std::size_t kRingHeaderBytes = 4096;
static_assert(sizeof(RingHeader) <= kRingHeaderBytes && std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

/// Whether a ring may have so many bytes: a power of two, neither tiny nor huge.
bool is_ring_size(std::uint64_t size);

/// The writing end. Each side keeps its own counter in private memory and believes the other's only as far as
/// the ring's size goes. write() is for one thread at a time.
class RingProducer {
 public:
  /// `memory` has a page for the header, then the ring's bytes.
  explicit RingProducer(SharedMemory memory);

  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_.data()); }
  /// Bytes written, as many as there is room for. Throws kInvalid when the consumer's counter is impossible.
  std::size_t write(std::span<const iovec> places);
  std::size_t room() const;
  /// Whether the consumer asked to be woken; it is told once.
  bool consumer_wants_wake() const;
  /// Asks to be woken for room; false when there is some, or the consumer broke the ring.
  bool ask_for_room();
  void stop_asking() { header().producer_waits.store(0, std::memory_order_relaxed); }

 private:
  void put(std::uint64_t at, BytesView bytes);

  SharedMemory memory_;
  std::size_t capacity_;
  std::atomic<std::uint64_t> tail_{0};  ///< as in the header, where the peer can change it
  std::size_t room_seen_ = 0;           ///< room there is at least
};

/// The reading end, for one thread.
class RingConsumer {
 public:
  explicit RingConsumer(SharedMemory memory);

  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_.data()); }
  std::size_t capacity() const { return capacity_; }
  /// The first bytes that are there and lie in a row; none when there are none. Throws kInvalid when the
  /// producer's counter is impossible.
  BytesView readable() const;
  /// `size` bytes may be overwritten. True when the producer asked to be woken for that; it is told once.
  bool consume(std::size_t size);
  /// Asks to be woken for bytes; false when there are some, or the producer broke the ring.
  bool ask_for_bytes();
  void stop_asking() { header().consumer_sleeps.store(0, std::memory_order_relaxed); }

 private:
  std::size_t available() const;

  SharedMemory memory_;
  std::size_t capacity_;
  std::uint64_t head_ = 0;
};

}  // namespace torchspan::net
