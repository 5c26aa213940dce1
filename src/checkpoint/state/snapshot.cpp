#include "checkpoint/state/snapshot.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>

#include "checkpoint/state/torch_types.h"

namespace torchspan::checkpoint {
namespace {

/// The buffer's memory as a tensor of bytes, which owns it.
at::Tensor tensor_of(Buffer buffer) {
  return at::from_blob(
      buffer.data, {static_cast<std::int64_t>(buffer.size)}, [owner = std::move(buffer.owner)](void*) {},
      at::TensorOptions(at::kByte));
}

}  // namespace

Listing listing_of(const std::vector<StateTensor>& tensors) {
  Listing listing;
  for (const StateTensor& state : tensors) {
    listing.push_back({state.name,
                       *element_type_of(state.tensor.scalar_type()),
                       state.shape,
                       {state.offset, sizes_of(state.tensor)},
                       state.fingerprint});
  }
  return listing;
}

std::byte* Snapshot::room_for(std::size_t bytes, bool pinned) {
  const bool fits = buffer_.defined() && buffer_.nbytes() >= bytes && (!pinned || buffer_.is_pinned());
  if (!fits) {
    buffer_.reset();
    const auto size = static_cast<std::int64_t>(bytes);
    buffer_ = pinned ? at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true))
                     : tensor_of(allocate_buffer(bytes));
  }
  return static_cast<std::byte*>(buffer_.data_ptr());
}

void Snapshot::copy(const std::vector<StateTensor>& tensors, const Plan::Share& share) {
  release();
  const std::uint64_t bytes = share.entries.empty() ? 0 : share.entries.back().end;
  if (bytes == 0) return data_.resize(share.entries.size());
  const bool pinned = std::any_of(share.parts.begin(), share.parts.end(),
                                  [&](std::size_t part) { return tensors[part].tensor.is_cuda(); });
  std::byte* const begin = room_for(bytes, pinned);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < share.entries.size(); ++i) {
    const HeaderEntry& entry = share.entries[i];
    const at::Tensor tensor = tensors[share.parts[i]].tensor.resolve_conj().resolve_neg();
    std::byte* place = begin + entry.begin;
    data_.emplace_back(place, entry.end - entry.begin);
    if (tensor.numel() == 0) continue;
    if (tensor.is_cpu() && tensor.is_contiguous()) {
      std::memcpy(place, tensor.data_ptr(), tensor.nbytes());
      continue;
    }
    const at::Tensor target = borrow_tensor(place, tensor.sizes(), tensor.scalar_type());
    if (!device::has_streams(tensor.device())) {
      target.copy_(tensor);
      continue;
    }
    held_.push_back(target);
    streams_.share(tensor, target, copies_);
  }
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
        fmt::format("a device failed while tensors were copied from it: {}; restart this process and restore "
                    "the last checkpoint",
                    torchspan::describe(std::current_exception()).text));
  }
  return data_;
}

void Snapshot::release() {
  copies_ = {};
  held_.clear();
  data_.clear();
}

}  // namespace torchspan::checkpoint
