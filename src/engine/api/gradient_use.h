#pragma once
#include <algorithm>

#include "engine/api/grad_field_sink.h"

namespace torchspan::engine {

/// Whether a hook on a parameter's leaf uses its gradients so.
inline bool has_gradient_use(const at::Tensor& parameter, GradientUse use) {
  const auto hooks = gradient_hooks(parameter);
  return std::any_of(hooks.begin(), hooks.end(),
                     [use](const GradientHook* hook) { return hook->use() == use; });
}

}  // namespace torchspan::engine
