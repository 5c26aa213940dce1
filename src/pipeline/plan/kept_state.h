#pragma once
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/pipeline/layers.h>

namespace torchspan::pipeline {

/// Removes the gradients of existing modules, and restores them and the buffers at the end of a scope.
class KeptState {
 public:
  explicit KeptState(const std::vector<BuiltLayer>& layers) {
    for (const BuiltLayer& layer : layers) {
      if (!layer.module) continue;
      for (const at::Tensor& parameter : layer.module->parameters()) {
        gradients_.emplace_back(parameter, parameter.grad());
        parameter.mutable_grad() = at::Tensor();
      }
      for (const at::Tensor& buffer : layer.module->buffers())
        buffers_.emplace_back(buffer, buffer.detach().clone());
    }
  }
  ~KeptState() {
    const torch::autograd::AutoGradMode mode(false);
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
    for (auto& [buffer, value] : buffers_) buffer.copy_(value);
  }
  KeptState(const KeptState&) = delete;
  KeptState& operator=(const KeptState&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_, buffers_;
};

}  // namespace torchspan::pipeline
