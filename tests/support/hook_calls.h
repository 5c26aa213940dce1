#pragma once
#include <memory>
#include <vector>

#include <ATen/ATen.h>

namespace torchspan::testing {

/// Counts the calls of one value's hooks, and those without a gradient.
struct HookCalls {
  int all = 0, undefined = 0;
};
using HooksCalls = std::vector<std::unique_ptr<HookCalls>>;

/// Scales the gradient of each value that has a graph, counts the call, and retains the result.
inline void add_hooks(const std::vector<at::Tensor>& values, HooksCalls& calls) {
  for (const at::Tensor& value : values) {
    calls.push_back(std::make_unique<HookCalls>());
    if (!value.requires_grad() || value.is_leaf()) continue;
    // Without NDEBUG, the headers of LibTorch refuse undefined gradients for hooks that take an at::Tensor.
    static_cast<const at::TensorBase&>(value).register_hook(
        [calls = calls.back().get()](const at::TensorBase& gradient) -> at::TensorBase {
          ++calls->all;
          if (gradient.defined()) return at::Tensor(gradient) * 0.75;
          ++calls->undefined;
          return gradient;
        });
    value.retain_grad();
  }
}

}  // namespace torchspan::testing
