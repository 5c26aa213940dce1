#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torchspan::net {

/// The first page of a block; the segment's bytes follow. The sender sets `lent`, the receiver clears it. A
/// receiver that clears it too early corrupts only messages to itself.
struct BlockHeader {
  std::atomic<std::uint32_t> lent;
};
inline constexpr std::size_t kBlockHeaderBytes = 4096;
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// Most blocks per connection and direction.
inline constexpr std::size_t kMostBlocks = 1024;

}  // namespace torchspan::net
