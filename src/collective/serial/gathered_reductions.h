#pragma once
#include <cstddef>
#include <functional>
#include <string>

#include "collective/serial/gathers.h"

/// Reductions of what all ranks gather, for engines that cannot reduce it.
namespace torchspan::collective {

/// Reduces in place, in the order of ranks.
void reduce_gathered(BlockingCollectives& collectives, const at::Tensor& tensor, ReduceOp reduction,
                     int ranks);

/// Two ranks whose sparse tensors cannot be added.
struct SparseDifference {
  std::size_t one, other;
  std::string its_call, other_call;
};
/// Returns the coalesced sum or average of sparse tensors, whose entries may differ. Calls `report`, which
/// throws, if ranks that have entries differ in their sparse dimensions.
at::Tensor reduce_sparse(const Gathers& gathers, const at::Tensor& tensor, ReduceOp reduction,
                         const std::function<void(const SparseDifference& calls)>& report);

}  // namespace torchspan::collective
