#pragma once
#include <exception>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/graph_pass.h"

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

/// Whether `tensor` is a plain dense tensor whose object and memory have no other owner, so that a write to it
/// has no effect elsewhere.
bool is_unshared(const at::Tensor& tensor);

/// held += incoming, in place only in unshared memory; both must be defined, of one shape and type. Dense and
/// sparse, in either order, give dense. Tensors that are not needed any more stay in `incoming` and in the
/// result, so that the caller can destroy them outside a lock. On an exception, `held` is unchanged. Call it
/// with grad mode off.
at::Tensor add_into(at::Tensor& held, at::Tensor& incoming);

/// Adds a new gradient to the sum so far, as LibTorch's engine does, bit for bit. Call it with grad mode off.
at::Tensor sum_of(at::Tensor held, at::Tensor gradient);

/// `gradient` as the first gradient of `parameter`: itself if that is safe (see GradientMap::accumulate), else
/// a copy in the parameter's layout. Call it with grad mode off.
at::Tensor adopt_gradient(const at::Tensor& parameter, at::Tensor gradient);

}  // namespace torchspan::engine
