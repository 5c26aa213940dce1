#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace torchspan {

/// Received bytes: valid and writable as long as `owner` lives. 64-byte aligned.
struct Buffer {
  std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<void> owner;
  std::uint32_t device_target = 0;  ///< not 0: in device memory, and the sender's Segment::device_target
};

/// Allocates the memory into which a message segment is received. A transport calls it per segment, after
/// checking the size against the limits.
using BufferAllocator = std::function<Buffer(std::size_t size)>;

/// Allocates 64-byte aligned heap memory. Blocks of 1 MiB and more use huge pages, which receive four to
/// five times faster than fresh 4 KiB pages. For size 0 there is no owner. Throws Error{kOverloaded} when
/// out of memory.
Buffer allocate_buffer(std::size_t size);

/// Bytes to send. Without `keep` they are borrowed until send() returns. With it they stay valid and
/// unchanged while `keep` is held, so the transport may continue sending afterwards.
struct Segment {
  const std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> keep;
  /// Not 0: the bytes are in device memory, have `keep`, and the device has written them. The number gives the
  /// device of the receiver where they are placed; both sides agreed on it. For channels that carry device memory.
  std::uint32_t device_target = 0;
};

/// Globally unique id: the rank of the worker that made it, and that worker's counter.
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
