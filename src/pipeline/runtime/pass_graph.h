#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"
#include "engine/api/split_pass.h"
#include "pipeline/runtime/layer_runner.h"

namespace torchspan::pipeline {

/// The autograd graph of one pass, from the inputs that need gradients to the outputs and the loss. Holds
/// edges, not outputs.
class PassGraph {
 public:
  /// Returns the inputs, detached from other graphs. Those that need gradients begin this graph if `records`;
  /// they are not leaves, so a layer may change them in place.
  std::map<int, Activation> attach_inputs(const std::map<int, Activation>& inputs, bool records);
  /// Keeps the edges of the outputs that require gradients; `loss_weight` is the gradient of the loss.
  void keep_edges(const LayerRangeOutputs& outputs, double loss_weight);
  bool has_edges() const { return !exits_.empty() || loss_edge_.is_valid(); }
  void drop_edges();
  /// Frees the inputs' gradients.
  void drop_inputs();
  /// Runs the backward from the edges with gradients, which are by link and member.
  void backward(std::map<int, std::vector<at::Tensor>>& gradients);
  /// The same in two parts: this one computes the gradients of the inputs, and afterwards drops the edges.
  void backward_inputs(std::map<int, std::vector<at::Tensor>>& gradients);
  bool is_between_parts() const { return two_parts_ != nullptr; }
  /// The second part accumulates the gradients of parameters.
  void backward_weights();
  /// The gradients of the inputs, by link, for the links that need any.
  std::map<int, std::vector<at::Tensor>> input_gradients(const std::map<int, Activation>& inputs) const;

 private:
  /// Where the gradient of one output enters the graph.
  struct Exit {
    int link = kOutside;
    std::size_t member = 0;
    torch::autograd::Edge edge;
  };
  class InputNode;
  /// Where a backward begins.
  struct Roots {
    torch::autograd::edge_list edges;
    std::vector<at::Tensor> gradients;
  };
  /// A backward in two parts, which fills `.grad`.
  struct TwoParts {
    explicit TwoParts(engine::NodePtr input_node) : pass(sink, {std::move(input_node)}) {}
    engine::GradFieldSink sink{0};
    engine::SplitPass pass;
  };
  Roots take_roots(std::map<int, std::vector<at::Tensor>>& gradients) const;

  engine::NodePtr input_node_;  ///< an InputNode
  std::vector<Exit> exits_;
  torch::autograd::Edge loss_edge_;
  at::Tensor loss_gradient_;
  std::unique_ptr<TwoParts> two_parts_;  ///< between the parts
};

}  // namespace torchspan::pipeline
