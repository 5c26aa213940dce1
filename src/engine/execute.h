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

/// Runs one node that is not a leaf: pre-hooks, apply, checks, post-hooks; then frees its saved tensors, unless
/// `retain`. Returns one gradient for each edge. `sink` goes to PassHooks.
torch::autograd::variable_list run_node(torch::autograd::Node& node, torch::autograd::variable_list inputs,
                                        GradientSink& sink, bool retain);

/// Runs only the hooks that precede a node's apply, and returns its gradients.
torch::autograd::variable_list run_pre_hooks(torch::autograd::Node& node,
                                             torch::autograd::variable_list inputs, GradientSink& sink);

/// Runs a node of LibTorch, which skips what only the edges that are not `wanted` need: apply and checks, no
/// hooks; then frees its saved tensors, unless `retain`. Returns one gradient for each edge, undefined for the
/// others.
torch::autograd::variable_list run_edges(torch::autograd::Node& node, torch::autograd::variable_list inputs,
                                         const std::vector<bool>& wanted, bool retain);

/// Runs a node at which the pass leaves this process: pre-hooks, except those of inputs that are not `reached`,
/// the node, post-hooks.
void run_pass_node(PassNode& node, torch::autograd::variable_list inputs, const std::vector<bool>& reached,
                   GradientSink& sink);

/// Replaces a run of a leaf's AccumulateGrad node: runs its hooks and those of its tensor, and gives the
/// gradient to `sink`.
void run_leaf(torch::autograd::AccumulateGrad& node, torch::autograd::variable_list inputs,
              GradientSink& sink);

/// Fits gradients to the inputs that `edges` lead to, as LibTorch does: reduces broadcast shapes, casts, moves
/// scalars between devices. Throws Error{kInvalid} for a gradient that does not match.
void fit_gradients(const torch::autograd::edge_list& edges, torch::autograd::variable_list& gradients);

/// Converts `cause` to an Error that names the node. Keeps kind, worker and frames of an Error.
Error name_failure(const std::string& node, const std::exception_ptr& cause);

}  // namespace torchspan::engine
