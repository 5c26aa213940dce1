#include "checkpoint/state/snapshot.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fmt/format.h>
#include <optional>
#include <span>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>

#include "checkpoint/state/torch_types.h"
#include "core/api/throw_invalid.h"

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

namespace {

/// For which tensors of a share the memory is used.
HostBlocks::Use use_for(const std::vector<StateTensor>& tensors, const Plan::Share& share) {
  HostBlocks::Use use = HostBlocks::Use::kHost;
  for (const std::size_t part : share.parts) {
    const at::Tensor& tensor = tensors[part].tensor;
    if (tensor.is_cuda()) return HostBlocks::Use::kPinned;
    if (device::has_streams(tensor.device())) use = HostBlocks::Use::kDevice;
  }
  return use;
}

}  // namespace

Listing listing_of(const std::vector<StateTensor>& tensors) {
  Listing listing;
  for (const StateTensor& state : tensors) {
    const std::optional<ElementType> type = element_type_of(state.tensor.scalar_type());
    if (!type) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format("the tensor '{}' is of dtype {}, which the safetensors format lacks; convert it",
                      state.name, c10::toString(state.tensor.scalar_type())));
    }
    listing.push_back(
        {state.name, *type, state.shape, {state.offset, sizes_of(state.tensor)}, state.fingerprint});
  }
  return listing;
}

void Snapshot::copy(const std::vector<StateTensor>& tensors, const Plan::Share& share) {
  release();
  if (share.entries.empty()) return;
  memory_.reserve(share.entries.back().end, use_for(tensors, share));
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < share.entries.size(); ++i) {
    const HeaderEntry& entry = share.entries[i];
    const at::Tensor tensor = tensors[share.parts[i]].tensor.resolve_conj().resolve_neg();
    const auto pieces = memory_.pieces(entry.begin, entry.end - entry.begin);
    for (const std::span<std::byte> piece : pieces) data_.emplace_back(piece);
    if (pieces.empty()) continue;
    if (pieces.size() == 1) {
      copy_to(pieces.front().data(), tensor);
      continue;
    }
    const at::Tensor bytes = tensor.contiguous().view({-1}).view(at::kByte);
    std::int64_t done = 0;
    for (const std::span<std::byte> piece : pieces) {
      const auto size = static_cast<std::int64_t>(piece.size());
      copy_to(piece.data(), bytes.narrow(0, done, size));
      done += size;
    }
  }
}

void Snapshot::copy_to(std::byte* place, const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.is_contiguous()) {
    std::memcpy(place, tensor.data_ptr(), tensor.nbytes());
    return;
  }
  const at::Tensor target = borrow_tensor(place, tensor.sizes(), tensor.scalar_type());
  if (!device::has_streams(tensor.device())) {
    target.copy_(tensor);
    return;
  }
  held_.push_back(target);
  streams_.share(tensor, target, copies_);
}

void Snapshot::borrow(const std::vector<StateTensor>& tensors, const Plan::Share& share) {
  release();
  for (const std::size_t part : share.parts) {
    held_.push_back(tensors[part].tensor.resolve_conj().resolve_neg().cpu().contiguous());
    data_.push_back(held_.back().numel() == 0 ? BytesView() : bytes_of(held_.back()));
  }
}

const std::vector<BytesView>& Snapshot::data() {
  try {
    copies_.wait();
  } catch (const std::exception&) {
    throw_invalid(
        "a device failed while tensors were copied from it: {}; restart this process and restore the last "
        "checkpoint",
        torchspan::describe(std::current_exception()).text);
  }
  return data_;
}

void Snapshot::release() {
  copies_ = {};
  held_.clear();
  data_.clear();
}

}  // namespace torchspan::checkpoint
