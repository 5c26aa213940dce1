#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <sys/uio.h>

#include <torchspan/core/bytes.h>

#include "core/api/unforked_memory.h"
#include "net/handshake.h"

namespace torchspan::net {

/// System calls of the local transport that may fail.
enum class LocalStep : std::uint8_t {
  kMakeMemory,      ///< create a memory file
  kReserveMemory,   ///< allocate its pages
  kMapMemory,       ///< map it, this side's or the peer's
  kPassDescriptor,  ///< send it to the peer
  kTakeDescriptor,  ///< receive one from the peer
};

/// Decides for tests which of these calls fail: true fails the step. Called on any thread; empty in programs.
using LocalFaults = std::function<bool(LocalStep)>;

inline bool fails(const LocalFaults& faults, LocalStep step) { return faults && faults(step); }

struct NewMemory {
  SharedMemory memory;
  Descriptor descriptor;
};
/// Makes zeroed, mapped memory with all its pages, which no process can shrink or grow; nullopt if the system
/// refuses.
std::optional<NewMemory> make_memory(const LocalFaults& faults, std::size_t size);

/// Maps memory that a peer made with make_memory(). Throws kInvalid if it has another size or is not sealed,
/// kOverloaded if it cannot be mapped.
SharedMemory map_memory(const LocalFaults& faults, const Descriptor& descriptor, std::size_t size);

/// A byte ring for one producer and one consumer, in memory that both map and that forked children do not have. This is its
/// first page:
struct RingHeader {
  std::array<std::byte, kNonceBytes> nonce;                ///< proves that both see the same memory
  alignas(64) std::atomic<std::uint64_t> tail;             ///< bytes written so far; set by the producer
  alignas(64) std::atomic<std::uint64_t> head;             ///< bytes consumed so far; set by the consumer
  alignas(64) std::atomic<std::uint32_t> consumer_sleeps;  ///< the consumer asks to be woken for bytes
  alignas(64) std::atomic<std::uint32_t> producer_waits;   ///< the producer asks to be woken for room
};
inline constexpr std::size_t kRingHeaderBytes = 4096;
static_assert(sizeof(RingHeader) <= kRingHeaderBytes && std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

/// Whether a ring may have `size` bytes: a power of two from 4 KiB to 1 GiB.
bool is_ring_size(std::uint64_t size);

/// The writing end. Each side keeps its counter in private memory, and checks the other side's counter
/// against the ring's size. write() is for one thread at a time.
class RingProducer {
 public:
  /// `memory` has a page for the header, then the ring's bytes.
  explicit RingProducer(SharedMemory memory);

  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_->data()); }
  /// Writes as many bytes as there is room for; returns how many. Throws kInvalid if the consumer's counter
  /// is impossible.
  std::size_t write(std::span<const iovec> places);
  std::size_t room() const;
  /// Whether the consumer asked to be woken; true once per request.
  bool consumer_wants_wake() const;
  /// Asks to be woken for room; returns false if there is some, or if the consumer broke the ring.
  bool ask_for_room();
  void stop_asking() { header().producer_waits.store(0, std::memory_order_relaxed); }

 private:
  void put(std::uint64_t at, BytesView bytes);

  UnforkedMemory memory_;
  std::size_t capacity_;
  std::atomic<std::uint64_t> tail_{0};  ///< the header has a copy, which the peer can change
  std::size_t room_seen_ = 0;           ///< there is at least this much room
};

/// The reading end, for one thread.
class RingConsumer {
 public:
  explicit RingConsumer(SharedMemory memory);

  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_->data()); }
  std::size_t capacity() const { return capacity_; }
  /// The first contiguous bytes that can be read; empty if there are none. Throws kInvalid if the producer's
  /// counter is impossible.
  BytesView readable() const;
  /// `size` bytes may be overwritten. Returns whether the producer asked to be woken for that; true once per
  /// request.
  bool consume(std::size_t size);
  /// Asks to be woken for bytes; returns false if there are some, or if the producer broke the ring.
  bool ask_for_bytes();
  void stop_asking() { header().consumer_sleeps.store(0, std::memory_order_relaxed); }

 private:
  std::size_t available() const;

  UnforkedMemory memory_;
  std::size_t capacity_;
  std::uint64_t head_ = 0;
};

}  // namespace torchspan::net
