#include "sharded/state/part_gather.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>

#include "collective/api/gathers_in_place.h"

namespace torchspan::sharded {
namespace {

/// Above this, a broadcast from each rank costs less than the copies of an all-gather.
constexpr std::int64_t kMostCopiedBytes = 256 << 10;

bool gathers_in_place(const collective::Group& group) {
  return dynamic_cast<const collective::GathersInPlace*>(group.backend().get()) != nullptr;
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

}  // namespace torchspan::sharded
