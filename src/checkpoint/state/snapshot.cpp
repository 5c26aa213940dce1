#include "checkpoint/state/snapshot.h"

#include <cstring>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include "checkpoint/state/torch_types.h"

namespace torchspan::checkpoint {

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

void Snapshot::copy(const std::vector<StateTensor>& tensors, const Plan::Share& share) {
  release();
  const std::uint64_t bytes = share.entries.empty() ? 0 : share.entries.back().end;
  if (buffer_.size < bytes) {
    buffer_ = {};
    buffer_ = allocate_buffer(bytes);
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < share.entries.size(); ++i) {
    const HeaderEntry& entry = share.entries[i];
    const at::Tensor& tensor = tensors[share.parts[i]].tensor;
    std::byte* place = buffer_.data + entry.begin;
    data_.emplace_back(place, entry.end - entry.begin);
    if (tensor.numel() == 0) continue;
    if (tensor.is_cpu() && tensor.is_contiguous()) {
      std::memcpy(place, tensor.data_ptr(), tensor.nbytes());
    } else {
      borrow_tensor(place, tensor.sizes(), tensor.scalar_type()).copy_(tensor);
    }
  }
}

void Snapshot::borrow(const std::vector<StateTensor>& tensors, const Plan::Share& share) {
  release();
  for (const std::size_t part : share.parts) {
    held_.push_back(tensors[part].tensor.cpu().contiguous());
    data_.push_back(held_.back().numel() == 0 ? BytesView() : bytes_of(held_.back()));
  }
}

void Snapshot::release() {
  held_.clear();
  data_.clear();
}

}  // namespace torchspan::checkpoint
