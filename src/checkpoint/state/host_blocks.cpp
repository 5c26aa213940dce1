#include "checkpoint/state/host_blocks.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <torchspan/detail/core/buffer.h>

namespace torchspan::checkpoint {
namespace {

at::Tensor allocate_block(std::size_t bytes, bool pinned) {
  const auto size = static_cast<std::int64_t>(bytes);
  if (pinned) return at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true));
  Buffer buffer = allocate_buffer(bytes);
  return at::from_blob(
      buffer.data, {size}, [owner = std::move(buffer.owner)](void*) {}, at::TensorOptions(at::kByte));
}

}  // namespace

std::vector<std::size_t> pinned_block_sizes(std::size_t bytes) {
  const std::size_t spare = std::max<std::size_t>(bytes / 16, 4096);
  std::vector<std::size_t> sizes;
  while (bytes > 0) {
    const bool last = std::bit_ceil(bytes) - bytes <= spare;
    sizes.push_back(last ? std::bit_ceil(bytes) : std::bit_floor(bytes));
    bytes -= std::min(bytes, sizes.back());
  }
  return sizes;
}

HostBlocks::HostBlocks() : HostBlocks(&allocate_block) {}

void HostBlocks::reserve(std::size_t bytes, Use use) {
  if (capacity() >= bytes && (use != Use::kPinned || use_ == Use::kPinned)) return;
  blocks_.clear();
  use_ = use;
  const std::vector<std::size_t> sizes = use == Use::kHost ? std::vector{bytes} : pinned_block_sizes(bytes);
  for (const std::size_t size : sizes) blocks_.push_back(allocate_(size, use == Use::kPinned));
}

std::vector<std::span<std::byte>> HostBlocks::pieces(std::size_t begin, std::size_t count) const {
  std::vector<std::span<std::byte>> found;
  for (const at::Tensor& block : blocks_) {
    if (count == 0) break;
    if (begin >= block.nbytes()) {
      begin -= block.nbytes();
      continue;
    }
    const std::size_t here = std::min(count, block.nbytes() - begin);
    found.emplace_back(static_cast<std::byte*>(block.data_ptr()) + begin, here);
    count -= here;
    begin = 0;
  }
  return found;
}

std::size_t HostBlocks::capacity() const {
  std::size_t bytes = 0;
  for (const at::Tensor& block : blocks_) bytes += block.nbytes();
  return bytes;
}

}  // namespace torchspan::checkpoint
