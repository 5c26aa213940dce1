#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/graph_pass.h"

namespace torchspan::engine {

/// Differentiates `roots`, which live in this process, and accumulates the gradients of the leaves in `sink`;
/// `.grad` stays as it is. `gradients` has one tensor a root, or none at all: then every root has one
/// element. Returns after the futures held by the sink; throws an Error whose call() names the node that
/// failed.
void backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
              GradientSink& sink, PassOptions options = {});

/// The leaves (parameters and inputs that require gradients) that the graphs of `roots` reach, once each, in
/// the order of discovery: what a backward pass from them would give gradients to.
std::vector<at::Tensor> leaf_tensors(const std::vector<at::Tensor>& roots);

}  // namespace torchspan::engine
