#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <torchspan/detail/device/autocast.h>

#include "engine/api/grad_field_sink.h"
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

/// Runs one micro-batch through one layer range, forward and backward. Holds inputs until the forward,
/// gradient edges (not outputs) until the backward, and nothing afterwards. Used by the training thread.
class LayerRangePass {
 public:
  LayerRangePass(const LocalPipeline& local, int range, int micro_batch, const RunMode& mode);

  void put_input(int link, Activation activation);
  bool has_inputs() const { return missing_inputs_ == 0; }

  /// Runs the layers. Returns the outputs by link; kOutside is the output of the last layer range. Throws an
  /// Error that names the layer and the micro-batch.
  std::map<int, Activation> forward(std::optional<MicroBatchLoss> loss);
  bool forward_done() const { return forward_done_; }
  /// The loss of the forward, without a graph; once.
  at::Tensor take_loss() { return std::move(loss_value_); }

  void put_gradients(int link, std::vector<at::Tensor> gradients);
  /// Whether the forward is done and all gradients that its outputs need have arrived.
  bool has_gradients() const { return forward_done_ && missing_gradients_ == 0; }

  bool can_recompute() const {
    return forward_done_ && needs_backward_ && !recomputed_ && (repeats_range() || runner_.any_kept());
  }
  /// Whether it may be repeated whenever the worker is idle: no layer called an operation of a group, which corresponding
  /// stages of several pipelines must call in one order.
  bool can_recompute_early() const { return can_recompute() && !communicates_; }
  /// Repeats the forward and records its graph, before backward().
  void recompute();
  /// Begins to bring offloaded inputs back, before recompute().
  void prefetch();
  /// Whether the backward returns a gradient of any input.
  bool any_input_wants() const;
  /// Accumulates the parameters' gradients; returns those of the inputs, by link, for links that need any.
  std::map<int, std::vector<at::Tensor>> backward();
  /// The same in two parts. This one returns the gradients of the inputs, and keeps what the second part needs; if
  /// no input needs a gradient, it leaves everything to the second part.
  std::map<int, std::vector<at::Tensor>> backward_inputs();
  /// The second part accumulates the parameters' gradients.
  void backward_weights();

 private:
  /// The thread at the forward, for its repetition.
  struct ThreadState {
    at::ThreadLocalState torch;
    device::Autocast autocast = device::Autocast::of_thread();  // `torch` lacks its dtypes
    std::optional<RandomState> random = {};                     // of a whole range without a seed
  };
  /// An input that waits in host memory between the forward and its repetition.
  struct Offloaded {
    int link = kOutside;
    std::size_t member = 0;
    device::OffloadedTensor tensor;
  };
  /// Whether the forward of the whole layer range is repeated, and not that of some layers.
  bool repeats_range() const { return mode_.recompute && local_.options.checkpoint_layers.empty(); }
  void move_inputs();
  void offload_inputs();
  std::map<int, Activation> activations_of(LayerRangeOutputs& outputs) const;
  void run_graph(StepPart::Kind kind, const std::function<void()>& part);

  const LocalPipeline& local_;
  const RunMode mode_;
  LayerRunner runner_;
  PassGraph graph_;
  int missing_inputs_ = 0;  ///< links whose data has not arrived
  int missing_gradients_ = 0;
  bool forward_done_ = false;
  bool recomputed_ = false;
  bool needs_backward_ = false;
  bool communicates_ = false;  ///< a layer called an operation of a group in the forward
  at::Tensor loss_value_;
  std::optional<MicroBatchLoss> loss_;
  std::map<int, Activation> inputs_;                  ///< by link
  std::map<int, std::vector<at::Tensor>> gradients_;  ///< of the outputs, by link
  std::optional<ThreadState> thread_state_;
  std::vector<Offloaded> offloaded_;
};

}  // namespace torchspan::pipeline
