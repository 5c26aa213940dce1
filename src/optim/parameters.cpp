#include "optim/parameters.h"

#include <fmt/format.h>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::optim {

bool never_trained(const at::Tensor& parameter) {
  return parameter.defined() && !parameter.is_floating_point() && !parameter.is_complex();
}

void check_parameters(const std::string& optimizer, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    const auto name = [&](std::size_t index) {
      return index < names.size() ? fmt::format("'{}', ", names[index]) : std::string();
    };
    const auto refuse = [&](const std::string& why) {
      throw_invalid("{}: {}{} {}", optimizer, name(i), describe_parameter(parameter, i, {}), why);
    };
    if (!parameter.defined()) refuse("is undefined");
    if (!parameter.is_leaf())
      refuse("is the result of a computation; pass the leaf that it was computed from");
    if (never_trained(parameter))
      refuse("cannot be trained, because its type is not a floating-point type; leave it out");
    const auto [first, is_new] = seen.emplace(parameter.unsafeGetTensorImpl(), i);
    if (is_new) continue;
    refuse(
        fmt::format("is the same tensor as parameter {}{} and would be updated twice in a step: list it once",
                    first->second, first->second < names.size() ? " '" + names[first->second] + "'" : ""));
  }
}

std::string describe_parameter(const at::Tensor& parameter, std::size_t index,
                               const std::vector<std::string>& names) {
  std::string text = fmt::format("parameter {}", index);
  if (index < names.size()) text += fmt::format(" '{}'", names[index]);
  if (!parameter.defined()) return text;
  return text +
         fmt::format(" (shape {}, {})", c10::str(parameter.sizes()), c10::toString(parameter.scalar_type()));
}

std::vector<std::pair<std::string, at::Tensor>> named_parameters_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (never_trained(item.value())) continue;
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
    throw_invalid(
        "{} needs all gradients, but step_in_backward() steps parameter {} of {} during backward(): call "
        "step() after it instead",
        verb, i, parameters.size());
  }
}

}  // namespace torchspan::optim
