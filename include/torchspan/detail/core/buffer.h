#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace torchspan {

/// Received bytes with their owner: valid and writable as long as `owner` lives. Storage is 64-byte aligned.
struct Buffer {
  std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<void> owner;
};

/// Makes the memory a message segment is received into. Called by a transport for each segment, after its
/// size was checked against the limits.
using BufferAllocator = std::function<Buffer(std::size_t size)>;

/// 64-byte aligned heap memory; segments of 1 MiB and more ask for huge pages, which receive four to five
/// times faster than fresh 4 KiB pages. No bytes need no owner. Throws Error{kOverloaded} without memory.
Buffer allocate_buffer(std::size_t size);

/// Bytes to be sent. Without `keep` they are borrowed for the duration of send() only; with it they stay
/// valid and unchanged for as long as `keep` is held, so a transport may go on sending after send() returned.
struct Segment {
  const std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> keep;
};

/// An id unique in a world's life: the worker that made it (its rank) and that worker's counter.
struct GlobalId {
  std::uint32_t worker = 0;
  std::uint64_t local = 0;
  friend auto operator<=>(const GlobalId&, const GlobalId&) = default;
};

}  // namespace torchspan

template <>
struct std::hash<torchspan::GlobalId> {
  std::size_t operator()(const torchspan::GlobalId& id) const noexcept {
    return std::hash<std::uint64_t>()(id.local * 0x9E3779B97F4A7C15ULL + id.worker);
  }
};
