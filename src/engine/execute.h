#pragma once
#include <exception>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/pass_node.h"

namespace torchspan::engine {

/// Runs one node that is not a leaf: pre-hooks, apply, checks, post-hooks; then frees what it had saved,
/// unless `retain`. Returns one gradient an edge. `sink` is for the hooks that want to know the pass.
torch::autograd::variable_list run_node(torch::autograd::Node& node, torch::autograd::variable_list inputs,
                                        GradientSink& sink, bool retain);

/// Runs a node at which the pass leaves this process: pre-hooks, but for those of inputs that are not
/// `reached`, the node itself, post-hooks.
void run_pass_node(PassNode& node, torch::autograd::variable_list inputs, const std::vector<bool>& reached,
                   GradientSink& sink);

/// Stands in for a leaf's AccumulateGrad node: runs its hooks and those of its tensor, but gives the gradient
/// to `sink`.
void run_leaf(torch::autograd::AccumulateGrad& node, torch::autograd::variable_list inputs,
              GradientSink& sink);

/// Checks gradients against what the nodes behind `edges` expect, as LibTorch does: reduces broadcast shapes,
/// casts, moves scalars between devices; throws Error{kInvalid} for what cannot be made to fit.
void fit_gradients(const torch::autograd::edge_list& edges, torch::autograd::variable_list& gradients);

/// `cause` as an Error that names the node; its kind, worker and frames are kept if it is one.
Error name_failure(const std::string& node, const std::exception_ptr& cause);

}  // namespace torchspan::engine
