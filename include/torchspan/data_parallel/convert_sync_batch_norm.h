#pragma once
#include <cstddef>

#include <torchspan/collective/group.h>

namespace torch::nn {
class Module;
}

namespace torchspan {

/// Makes every batch norm in `module` normalize over the batches of all ranks of `group`; returns their
/// number. Collective; call it before DistributedDataParallel. A batch norm in a torch::nn::Sequential is
/// replaced by a SyncBatchNorm with the same tensors, and an existing SyncBatchNorm gets the group. A batch
/// norm that is a class member cannot be replaced: Error{kInvalid} names it; declare it as SyncBatchNorm
/// (data_parallel/sync_batch_norm.h). Throws Error{kInvalid} on all ranks if modules differ, leaving them
/// unchanged.
std::size_t convert_sync_batch_norm(torch::nn::Module& module, const collective::Group& group);

}  // namespace torchspan
