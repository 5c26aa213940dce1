#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/data_parallel/options.h>

namespace torch::nn {
class Module;
}

namespace torchspan::data_parallel {

/// What of a module concerns the other ranks: its parameters and buffers in the order of the module's walk,
/// each tensor once under its first name, without the ignored ones.
struct ModuleParts {
  std::vector<Parameter> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};

/// Throws Error{kInvalid} for a name in the options that the module does not have.
ModuleParts parts_of(const torch::nn::Module& module, const DataParallelOptions& options);

}  // namespace torchspan::data_parallel
