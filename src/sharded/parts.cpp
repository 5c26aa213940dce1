#include "sharded/parts.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/optimizer.h>

#include "collective/api/shares_memory.h"

namespace torchspan::sharded {
namespace {

/// Above this, a broadcast from each rank costs less than the copies of an all-gather.
constexpr std::int64_t kMostCopiedBytes = 256 << 10;

bool gathers_in_place(const collective::Group& group) {
  return dynamic_cast<const collective::SharesMemory*>(group.backend().get()) != nullptr;
}

}  // namespace

/// Gathers one row, because the first dimension of an all-gather may differ between ranks.
PartGather::PartGather(const collective::Group& group, at::Tensor flat, at::Tensor part)
    : flat_(std::move(flat)), part_(std::move(part)) {
  const at::NoGradGuard no_grad;
  const std::int64_t count = part_.numel();
  if (count == 0) return;
  if (gathers_in_place(group)) {
    parts_.push_back(group.all_gather_into_tensor(flat_.view({group.size(), count}), part_.view({1, count})));
    return;
  }
  const at::Tensor own = flat_.narrow(0, group.rank() * count, count);
  if (own.data_ptr() != part_.data_ptr()) own.copy_(part_);
  if (group.size() == 1) return;
  if (count * flat_.element_size() <= kMostCopiedBytes) {
    gathered_ = group.all_gather(own.view({1, count}));
    return;
  }
  for (int rank = 0; rank < group.size(); ++rank)
    parts_.push_back(group.broadcast(flat_.narrow(0, rank * count, count), rank));
}

void PartGather::wait() {
  const at::Tensor flat = std::exchange(flat_, {}), part = std::exchange(part_, {});
  for (const auto& one : std::exchange(parts_, {})) one.wait();
  if (!gathered_.valid()) return;
  const at::NoGradGuard no_grad;
  const std::int64_t count = part.numel();
  const std::vector<at::Tensor> rows = std::exchange(gathered_, {}).wait();
  for (std::size_t rank = 0; rank < rows.size(); ++rank)
    flat.narrow(0, static_cast<std::int64_t>(rank) * count, count).copy_(rows[rank].view({count}));
}

at::Tensor shared_or_private(const collective::Group& group, std::int64_t count,
                             const at::TensorOptions& options) {
  if (group.size() > 1 && options.device().is_cpu()) {
    try {
      return group.allocate({count}, c10::typeMetaToScalarType(options.dtype()));
    } catch (const Error&) {  // the other ranks then get this rank's parts through staging memory
    }
  }
  return at::empty({count}, options);
}

namespace {

struct Extent {
  const std::byte* begin;
  const std::byte* end;
  std::size_t index;
};

Extent extent_of(const at::Tensor& tensor, std::size_t index) {
  const auto* begin = static_cast<const std::byte*>(tensor.data_ptr());
  return {begin, begin + tensor.nbytes(), index};
}

}  // namespace

std::optional<std::pair<std::size_t, std::size_t>> overlapping(const std::vector<at::Tensor>& tensors) {
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0 && tensors[i].is_non_overlapping_and_dense() &&
        tensors[i].data_ptr() != nullptr)
      extents.push_back(extent_of(tensors[i], i));
  }
  std::ranges::sort(extents, {}, &Extent::begin);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    // Without an earlier overlap, the last of them ends last.
    if (extents[i].begin < extents[i - 1].end) return std::minmax(extents[i - 1].index, extents[i].index);
  }
  return std::nullopt;
}

ClipTerms::ClipTerms(double max, double type) : max_norm(max), norm_type(type) {
  optim::clip_factor(0, max_norm);
  optim::gradient_norm({}, norm_type);
}

bool unscale_at_places(const std::vector<state::PlacedGradient>& gradients, double scale) {
  const at::NoGradGuard no_grad;
  at::Tensor wrong;  // on the device of the gradients
  for (const state::PlacedGradient& one : gradients) {
    if (!one.gradient.defined()) continue;
    const at::Tensor here = at::isfinite(one.gradient).logical_not_().any();
    wrong = wrong.defined() ? wrong.logical_or(here) : here;
    one.gradient.div_(scale);
  }
  return state::on_any_rank(gradients, wrong.defined() && wrong.item<bool>());
}

}  // namespace torchspan::sharded
