#include "optim/parameters.h"

#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

namespace torchspan::optim {

std::vector<at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
  }
  return parameters;
}

}  // namespace torchspan::optim
