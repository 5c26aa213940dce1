#pragma once
#include <cstddef>

#include <torchspan/collective/group.h>

namespace torch::nn {
class Module;
}

namespace torchspan {

/// Collective: makes every batch norm in `module` normalize over the batches of all ranks of `group`, and
/// returns how many there are. Replaces those in a torch::nn::Sequential by SyncBatchNorm, with their tensors;
/// an existing SyncBatchNorm gets the group; a member of a class must be declared as SyncBatchNorm
/// (data_parallel/sync_batch_norm.h), else Error{kInvalid} names it. Call it before DistributedDataParallel.
/// Throws Error{kInvalid} on all ranks when they differ; the module is then unchanged.
std::size_t convert_sync_batch_norm(torch::nn::Module& module, const collective::Group& group);

}  // namespace torchspan
