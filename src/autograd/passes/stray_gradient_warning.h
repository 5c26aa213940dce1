#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/runtime.h>

#include "core/api/rate_limited_warning.h"

namespace torchspan::autograd {

/// Counts and logs parameters whose gradients LibTorch's engine put into `.grad` during a pass. Thread-safe.
class StrayGradientWarning {
 public:
  explicit StrayGradientWarning(Runtime& runtime)
      : metrics_(runtime.metrics), warning_(runtime.log, runtime.executor) {}
  void write(const std::vector<at::Tensor>& parameters);

 private:
  Metrics& metrics_;
  RateLimitedWarning warning_;
};

}  // namespace torchspan::autograd
