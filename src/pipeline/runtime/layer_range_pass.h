#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/pipeline/pipeline.h>

#include "pipeline/layers/random.h"
#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// What a link carries, and which members want a gradient back.
struct Activation {
  Batch batch;
  std::vector<std::uint8_t> wants_gradient;
  bool wants_any() const;
};

/// The pipeline's own input and output, where a link's number stands.
inline constexpr int kOutside = -1;

/// How the passes of a step are run.
struct RunMode {
  std::uint64_t step = 0;
  bool gradients = false;  ///< a backward will come
  bool recompute = false;  ///< keeps only the inputs and recomputes the forward for the backward
};

/// The loss of one micro-batch, after the last layer range.
struct MicroBatchLoss {
  const Loss* loss = nullptr;
  Batch target;
  double weight = 1;  ///< of this micro-batch, in the gradient
};

/// Runs one micro-batch through one layer range, forward and backward. Holds inputs until the forward,
/// gradient edges (not outputs) until the backward, and nothing after it. Used by the thread that trains.
class LayerRangePass {
 public:
  LayerRangePass(const LocalPipeline& local, int range, int micro_batch, RunMode mode);

  void put_input(int link, Activation activation);
  bool has_inputs() const { return missing_inputs_ == 0; }

  /// Runs the layers. Returns what goes out, by link; kOutside is the output of the last layer range. Throws an
  /// Error that names the layer and the micro-batch.
  std::map<int, Activation> forward(std::optional<MicroBatchLoss> loss);
  bool forward_done() const { return forward_done_; }
  /// The loss of the forward.
  double loss() const { return loss_value_; }

  void put_gradients(int link, std::vector<at::Tensor> gradients);
  /// The forward is done and all gradients that its outputs wanted are here.
  bool has_gradients() const { return forward_done_ && missing_gradients_ == 0; }

  bool can_recompute() const { return forward_done_ && mode_.recompute && needs_backward_ && !recomputed_; }
  /// Computes a checkpointed forward again, ahead of its backward.
  void recompute();
  /// Gives parameters their gradients; returns those of the inputs, by link, for links that want any.
  std::map<int, std::vector<at::Tensor>> backward();

 private:
  /// Where a gradient goes into the graph.
  struct Exit {
    int link = kOutside;
    std::size_t member = 0;
    torch::autograd::Edge edge;
  };
  struct Outputs;
  class Received;

  std::map<int, Activation> attach_inputs();
  Outputs run_layers(const std::map<int, Activation>& inputs, bool repeated);
  Batch run_use(int order, const Batch& input, std::map<std::string, at::Tensor> pops,
                std::map<std::string, at::Tensor>& stashed, bool repeated);
  SeededScope seeded_scope(int order) const;
  void keep_exits(const Outputs& outputs);
  std::map<int, Activation> activation_of(Outputs& outputs) const;
  bool any_layer_learns() const;
  [[noreturn]] void fail(const std::string& where, const char* phase) const;
  std::string range_name() const;

  const LocalPipeline& local_;
  const int range_;
  const int micro_batch_;
  const RunMode mode_;
  int missing_inputs_ = 0;
  int missing_gradients_ = 0;
  bool forward_done_ = false;
  bool recomputed_ = false;
  bool needs_backward_ = false;
  double loss_value_ = 0;
  std::optional<MicroBatchLoss> loss_;
  std::map<int, Activation> inputs_;
  std::optional<RandomState> random_;
  std::optional<at::ThreadLocalState> thread_state_;
  std::shared_ptr<Received> received_;
  std::vector<Exit> exits_;
  torch::autograd::Edge loss_edge_;
  at::Tensor loss_gradient_;
  std::map<int, std::vector<at::Tensor>> gradients_;
};

}  // namespace torchspan::pipeline
