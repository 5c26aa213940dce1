#include "optim/parameters.h"

#include <fmt/format.h>
#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "engine/api/gradient_use.h"

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

void refuse_steps_in_backward(const std::vector<at::Tensor>& parameters, const char* verb) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad() ||
        !engine::has_gradient_use(parameters[i], engine::GradientUse::kSteps))
      continue;
    throw Error(ErrorKind::kInvalid,
                fmt::format("{} needs all gradients, but step_in_backward() steps parameter {} of {} during "
                            "backward(): call step() after it instead",
                            verb, i, parameters.size()));
  }
}

}  // namespace torchspan::optim
