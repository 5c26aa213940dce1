#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::engine {

/// The leaves (parameters and inputs that require grad) that the graphs of `roots` reach, once each, in the
/// order of discovery. A backward pass from `roots` gives them gradients.
std::vector<at::Tensor> leaf_tensors(const std::vector<at::Tensor>& roots);

}  // namespace torchspan::engine
