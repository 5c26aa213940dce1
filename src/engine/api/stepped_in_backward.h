#pragma once
#include <algorithm>

#include "engine/api/grad_field_sink.h"

namespace torchspan::engine {

/// Whether an optimizer's step_in_backward() steps a parameter as soon as LibTorch's engine has its gradient.
inline bool is_stepped_in_backward(const at::Tensor& parameter) {
  const auto hooks = gradient_hooks(parameter);
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const GradientHook* hook) { return hook->use() == GradientUse::kSteps; });
}

}  // namespace torchspan::engine
