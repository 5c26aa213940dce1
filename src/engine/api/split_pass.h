#pragma once
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/node_ptr.h"

namespace torchspan::engine {

/// One backward pass over a graph of this process, in two parts: run_inputs() computes the gradients that reach
/// the input nodes, run_weights() those of all other leaves. Together they give each leaf the same gradient, bit
/// for bit, as a pass in one part, and call each hook once. Between the parts it keeps, for every node that has
/// edges of both parts, its incoming gradient and saved tensors, or its outgoing gradients for weights, and frees
/// all other saved tensors. The room's README says which nodes run twice. Used by one thread at a time.
class SplitPass {
 public:
  /// `inputs` are nodes without edges. `sink`, which must outlive the pass, gets the gradients of leaves; the
  /// pass ends it after the second part or a failure.
  SplitPass(GradientSink& sink, std::vector<NodePtr> inputs);
  /// A pass that has not ended ends with Error{kCancelled}.
  ~SplitPass();
  SplitPass(const SplitPass&) = delete;
  SplitPass& operator=(const SplitPass&) = delete;

  /// Adds an input of a node with its gradient, before the first part. Throws Error{kInvalid} if `gradient` does
  /// not match.
  void add_root(torch::autograd::Edge root, at::Tensor gradient);
  /// Throws an Error that names the node that failed; the pass has then ended and kept nothing.
  void run_inputs();
  /// Runs after run_inputs(), with the same state of LibTorch on the thread. Throws in the same way; gradients
  /// that leaves already have stay in the sink.
  void run_weights();

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::engine
