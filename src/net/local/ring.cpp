#include "net/local/ring.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/mman.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

SharedMemory map_unless_refused(const LocalFaults& faults, const Descriptor& descriptor, std::size_t size,
                                int flags) {
  if (fails(faults, LocalStep::kMapMemory)) {
    errno = ENOMEM;
    return {};
  }
  return SharedMemory::map(descriptor, size, flags);
}

}  // namespace

std::optional<NewMemory> make_memory(const LocalFaults& faults, std::size_t size) {
  if (fails(faults, LocalStep::kMakeMemory)) return std::nullopt;
  NewMemory made{{}, create_memory_file("torchspan")};
  if (!made.descriptor || fails(faults, LocalStep::kReserveMemory)) return std::nullopt;
  if (!seal_memory_file(made.descriptor, size, FilePages::kReserved)) return std::nullopt;
  made.memory = map_unless_refused(faults, made.descriptor, size, MAP_POPULATE);
  if (!made.memory) return std::nullopt;
  return made;
}

SharedMemory map_memory(const LocalFaults& faults, const Descriptor& descriptor, std::size_t size) {
  if (!is_sealed_memory_file(descriptor, size)) {
    throw_invalid("passed memory that is not sealed or is not of the announced size");
  }
  SharedMemory memory = map_unless_refused(faults, descriptor, size, 0);
  if (!memory) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("passed {} bytes of memory that cannot be mapped here: {}; lower "
                            "LocalOptions::pool_bytes there, or raise the memory limit of this process",
                            size, std::strerror(errno)));
  }
  return memory;
}

namespace {

constexpr std::uint64_t kLeastRing = 4096;
constexpr std::uint64_t kMostRing = std::uint64_t{1} << 30;
/// Readable bytes are returned in parts of this size, so that both sides work at the same time.
constexpr std::size_t kParts = 4;

/// Sequentially consistent, like the counters: if one side writes while the other falls asleep, at least one
/// of them sees it.
bool take_flag(std::atomic<std::uint32_t>& flag) { return flag.load() != 0 && flag.exchange(0) != 0; }

}  // namespace

bool is_ring_size(std::uint64_t size) {
  return std::has_single_bit(size) && size >= kLeastRing && size <= kMostRing;
}

RingProducer::RingProducer(SharedMemory memory)
    : memory_(not_inherited(std::move(memory))), capacity_(memory_->size() - kRingHeaderBytes) {}

std::size_t RingProducer::room() const {
  const std::uint64_t used = tail_.load(std::memory_order_relaxed) - header().head.load();
  if (used > capacity_) throw_invalid("reports more bytes read than were written");
  return capacity_ - used;
}

std::size_t RingProducer::write(std::span<const iovec> places) {
  std::size_t wanted = 0;
  for (const iovec& place : places) wanted += place.iov_len;
  // Reading the consumer's counter costs a cache miss: read it only if its last value leaves too little room.
  if (wanted > room_seen_) room_seen_ = room();
  const std::size_t room = room_seen_;
  const std::uint64_t start = tail_.load(std::memory_order_relaxed);
  std::size_t written = 0;
  for (const iovec& place : places) {
    const std::size_t size = std::min(place.iov_len, room - written);
    put(start + written, {static_cast<const std::byte*>(place.iov_base), size});
    written += size;
    if (size < place.iov_len) break;
  }
  if (written == 0) return 0;
  room_seen_ -= written;
  tail_.store(start + written, std::memory_order_relaxed);
  header().tail.store(start + written);
  return written;
}

void RingProducer::put(std::uint64_t at, BytesView bytes) {
  if (bytes.empty()) return;
  std::byte* ring = memory_->data() + kRingHeaderBytes;
  const std::size_t offset = at & (capacity_ - 1);
  const std::size_t first = std::min(bytes.size(), capacity_ - offset);
  std::memcpy(ring + offset, bytes.data(), first);
  if (first < bytes.size()) std::memcpy(ring, bytes.data() + first, bytes.size() - first);
}

bool RingProducer::consumer_wants_wake() const { return take_flag(header().consumer_sleeps); }

bool RingProducer::ask_for_room() {
  header().producer_waits.store(1);
  return tail_.load(std::memory_order_relaxed) - header().head.load() == capacity_;
}

RingConsumer::RingConsumer(SharedMemory memory)
    : memory_(not_inherited(std::move(memory))), capacity_(memory_->size() - kRingHeaderBytes) {}

std::size_t RingConsumer::available() const {
  const std::uint64_t size = header().tail.load() - head_;
  if (size > capacity_) throw_invalid("reports more bytes written than its ring holds");
  return size;
}

BytesView RingConsumer::readable() const {
  const std::size_t offset = head_ & (capacity_ - 1);
  const std::size_t size = std::min({available(), capacity_ - offset, capacity_ / kParts});
  return {memory_->data() + kRingHeaderBytes + offset, size};
}

bool RingConsumer::consume(std::size_t size) {
  head_ += size;
  header().head.store(head_);
  return take_flag(header().producer_waits);
}

bool RingConsumer::ask_for_bytes() {
  header().consumer_sleeps.store(1);
  return header().tail.load() == head_;
}

}  // namespace torchspan::net
