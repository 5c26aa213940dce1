#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "engine/api/node_ptr.h"
#include "pipeline/runtime/layer_runner.h"

namespace torchspan::pipeline {

/// The autograd graph of one pass, from the inputs that want gradients to the outputs and the loss. Holds
/// edges, not outputs.
class PassGraph {
 public:
  /// Returns the inputs, detached from other graphs. Those that want gradients begin this graph if `records`;
  /// they are not leaves, so a layer may change them in place.
  std::map<int, Activation> attach_inputs(const std::map<int, Activation>& inputs, bool records);
  /// Keeps the edges of the outputs that require gradients; `loss_weight` is the gradient of the loss.
  void keep_edges(const LayerRangeOutputs& outputs, double loss_weight);
  bool has_edges() const { return !exits_.empty() || loss_edge_.is_valid(); }
  void drop_edges();
  /// Runs the backward from the edges with gradients, which are by link and member.
  void backward(std::map<int, std::vector<at::Tensor>>& gradients);
  /// The gradients of the inputs, by link, for the links that want any.
  std::map<int, std::vector<at::Tensor>> input_gradients(const std::map<int, Activation>& inputs) const;

 private:
  /// Where the gradient of one output enters the graph.
  struct Exit {
    int link = kOutside;
    std::size_t member = 0;
    torch::autograd::Edge edge;
  };
  class InputNode;

  engine::NodePtr input_node_;  ///< an InputNode
  std::vector<Exit> exits_;
  torch::autograd::Edge loss_edge_;
  at::Tensor loss_gradient_;
};

}  // namespace torchspan::pipeline
