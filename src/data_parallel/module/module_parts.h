#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/data_parallel/options.h>

#include "state/api/place.h"

namespace torch::nn {
class Module;
}

namespace torchspan::data_parallel {

/// The parameters and buffers that a module has in common with the other ranks: in the module's order, each
/// tensor once under its first name, without ignored ones.
struct ModuleParts {
  std::vector<Parameter> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};

/// Throws Error{kInvalid} for a name in the options that the module does not have.
ModuleParts parts_of(const torch::nn::Module& module, const DataParallelOptions& options);
/// Gives places to what each rank keeps for itself: ignored parameters and buffers, and all buffers without
/// broadcast_buffers. What an earlier wrapper left to each rank, and this one does not, is whole again.
void mark_own(const torch::nn::Module& module, const DataParallelOptions& options,
              const state::RanksPtr& ranks);

}  // namespace torchspan::data_parallel
