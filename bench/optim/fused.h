#pragma once
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torchspan::bench {

/// Returns a step of LibTorch's fused CPU kernel (what torch.optim runs with `fused=True` in Python) over
/// `parameters`, with the same hyperparameters as the unfused peer. Empty if this LibTorch has no such kernel (all
/// releases before 2.4) or `variant` is none of SGD, SGD_momentum, Adam, AdamW, Adagrad.
std::function<void()> fused_step(const std::string& variant, std::vector<at::Tensor> parameters);

}  // namespace torchspan::bench
