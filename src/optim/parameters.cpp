#include "optim/parameters.h"

#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

namespace torchspan::optim {

std::vector<std::pair<std::string, at::Tensor>> named_parameters_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && seen.insert(gradient.unsafeGetTensorImpl()).second)
      gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace torchspan::optim
