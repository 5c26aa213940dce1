#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>

#include <torchspan/detail/device/autocast.h>

#include "pipeline/layers/random.h"
#include "pipeline/runtime/layer_runner.h"
#include "pipeline/runtime/offloaded_inputs.h"
#include "pipeline/runtime/pass_graph.h"
#include "pipeline/runtime/repeated_uses.h"

namespace torchspan::pipeline {

/// Runs one micro-batch through one layer range, forward and backward. Holds inputs until the forward,
/// gradient edges (not outputs) until the backward, and nothing afterwards. Used by the training thread.
class LayerRangePass {
 public:
  LayerRangePass(const LocalPipeline& local, int range, int micro_batch, RunMode mode);

  void put_input(int link, Activation activation);
  bool has_inputs() const { return missing_.inputs == 0; }

  /// Runs the layers. Returns the outputs by link; kOutside is the output of the last layer range. Throws an
  /// Error that names the layer and the micro-batch.
  std::map<int, Activation> forward(std::optional<MicroBatchLoss> loss);
  bool forward_done() const { return forward_done_; }
  /// The loss of the forward, without a graph; once.
  at::Tensor take_loss() { return std::move(loss_value_); }

  void put_gradients(int link, std::vector<at::Tensor> gradients);
  /// Whether the forward is done and all gradients that its outputs need have arrived.
  bool has_gradients() const { return forward_done_ && missing_.gradients == 0; }

  bool can_recompute() const {
    return forward_done_ && needs_backward_ && !recomputed_ && (repeats_range() || repeated_uses_.any());
  }
  /// Whether it may be repeated whenever the worker is idle: no layer called an operation of a group, which corresponding
  /// stages of several pipelines must call in one order.
  bool can_recompute_early() const { return can_recompute() && !communicates_; }
  /// Repeats the forward and records its graph, before backward().
  void recompute();
  /// Begins to bring offloaded inputs back, before recompute().
  void prefetch() { offloaded_.prefetch(); }
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
  /// Numbers of links whose data has not arrived.
  struct Missing {
    int inputs = 0;
    int gradients = 0;
  };
  /// The thread at the forward, for its repetition.
  struct ThreadState {
    at::ThreadLocalState torch;
    device::Autocast autocast = device::Autocast::of_thread();  // `torch` lacks its dtypes
    std::optional<RandomState> random = {};                     // of a whole range without a seed
  };
  /// Whether the forward of the whole layer range is repeated, and not that of some layers.
  bool repeats_range() const { return mode_.recompute && local_.options.checkpoint_layers.empty(); }
  void run_graph(StepPart::Kind kind, const std::function<void()>& part);
  std::map<int, Activation> activation_of(LayerRangeOutputs& outputs) const;

  const LocalPipeline& local_;
  const RunMode mode_;
  const LayerRunner runner_;
  PassGraph graph_;
  Missing missing_;
  bool forward_done_ = false;
  bool recomputed_ = false;
  bool needs_backward_ = false;
  bool communicates_ = false;  ///< a layer called an operation of a group in the forward
  at::Tensor loss_value_;
  std::optional<MicroBatchLoss> loss_;
  std::map<int, Activation> inputs_;                  ///< by link
  std::map<int, std::vector<at::Tensor>> gradients_;  ///< of the outputs, by link
  std::optional<ThreadState> thread_state_;
  RepeatedUses repeated_uses_;
  OffloadedInputs offloaded_;
};

}  // namespace torchspan::pipeline
