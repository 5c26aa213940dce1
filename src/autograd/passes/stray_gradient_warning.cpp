#include "autograd/passes/stray_gradient_warning.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string>

namespace torchspan::autograd {

void StrayGradientWarning::write(const std::vector<at::Tensor>& parameters) {
  metrics_.counter("autograd.stray_gradients").add(parameters.size());
  std::string shapes;
  for (const at::Tensor& parameter : parameters)
    shapes += fmt::format("{}[{}]", shapes.empty() ? "" : ", ", fmt::join(parameter.sizes(), ", "));
  warning_.write(fmt::format(
      "in a distributed backward pass, a backward function or a hook ran LibTorch's engine, which "
      "put the gradients of {} parameters into .grad; the context does not have them, so its "
      "optimizers do not use them. Pass the parameters of a checkpointed function as detached inputs and "
      "return their gradients (shapes: {})",
      parameters.size(), shapes));
}

}  // namespace torchspan::autograd
