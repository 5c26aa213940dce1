#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/graph_pass.h"

namespace torchspan::engine {

/// Differentiates `roots`, which are in this process, and accumulates the gradients of the leaves in `sink`;
/// `.grad` stays as it is. `gradients` has one tensor for each root, or is empty, and then every root must have
/// one element. Returns when the futures held by the sink have completed. Throws an Error whose call() names
/// the node that failed.
void backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
              GradientSink& sink, PassOptions options = {});

/// The leaves (parameters and inputs that require grad) that the graphs of `roots` reach, once each, in the
/// order of discovery. A backward pass from `roots` gives them gradients.
std::vector<at::Tensor> leaf_tensors(const std::vector<at::Tensor>& roots);

}  // namespace torchspan::engine
