#include "sharded/state/part_gather.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

namespace torchspan::sharded {
namespace {

/// Above this, a broadcast from each rank costs less than the copies of an all-gather.
constexpr std::int64_t kMostCopiedBytes = 256 << 10;

}  // namespace

PartGather::PartGather(const collective::Group& group, at::Tensor flat, std::int64_t chunk)
    : flat_(std::move(flat)), chunk_(chunk) {
  if (group.size() == 1 || chunk == 0) return;
  const at::NoGradGuard no_grad;
  if (chunk * flat_.element_size() <= kMostCopiedBytes) {
    // One row, because the first dimension of an all-gather may differ between ranks.
    gathered_ = group.all_gather(flat_.narrow(0, group.rank() * chunk, chunk).view({1, chunk}));
    return;
  }
  for (int rank = 0; rank < group.size(); ++rank)
    parts_.push_back(group.broadcast(flat_.narrow(0, rank * chunk, chunk), rank));
}

void PartGather::wait() {
  const at::Tensor flat = std::exchange(flat_, {});
  for (const auto& part : std::exchange(parts_, {})) part.wait();
  if (!gathered_.valid()) return;
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> rows = std::exchange(gathered_, {}).wait();
  for (std::size_t rank = 0; rank < rows.size(); ++rank)
    flat.narrow(0, static_cast<std::int64_t>(rank) * chunk_, chunk_).copy_(rows[rank].view({chunk_}));
}

}  // namespace torchspan::sharded
