#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <torchspan/pipeline/pipeline.h>

#include "pipeline/layers/random.h"
#include "pipeline/runtime/activation.h"
#include "pipeline/runtime/cache_state.h"
#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// The loss of one micro-batch, after the last layer range.
struct MicroBatchLoss {
  const Loss* loss = nullptr;
  Batch target;
  double weight = 1;  ///< of this micro-batch, in the gradient
};

/// The outputs of a layer range, with their graph if one was recorded.
struct LayerRangeOutputs {
  std::map<int, Batch> batches;  ///< by link; kOutside: the output of the last layer range
  at::Tensor loss;               ///< undefined if the pass has none
};

/// How the passes of a step run.
struct RunMode {
  std::uint64_t step = 0;
  bool gradients = false;         ///< a backward will come
  bool recompute = false;         ///< keeps only the inputs and recomputes the forward for the backward
  CacheTensors* cache = nullptr;  ///< what layers keep between steps; null: nothing
  std::uint64_t random_step = 0;  ///< in seed_of_use()
};

/// Runs the layers of one layer range on one micro-batch. Errors name the layer and the micro-batch. Used by
/// the training thread.
class LayerRunner {
 public:
  LayerRunner(const LocalPipeline& local, int range, int micro_batch, const RunMode& mode)
      : local_(local), range_(range), micro_batch_(micro_batch), mode_(mode) {}

  /// `inputs` are by link; `repeated` if activation checkpointing recomputes the forward.
  LayerRangeOutputs run(const std::map<int, Activation>& inputs, const std::optional<MicroBatchLoss>& loss,
                        bool repeated) const;
  int range_index() const { return range_; }
  int micro_batch() const { return micro_batch_; }
  const LayerRange& range() const { return local_.plan.layer_ranges[static_cast<std::size_t>(range_)]; }
  /// Whether any parameter of the layers requires a gradient.
  bool any_layer_learns() const;
  /// Wraps the current exception into an Error that names `where`.
  [[noreturn]] void fail(const std::string& where, const char* phase) const;
  /// Throws fail() for the whole layer range.
  [[noreturn]] void fail_range(const char* phase) const;

 private:
  Batch run_use(int order, const Batch& input, std::map<std::string, at::Tensor> pops,
                std::map<std::string, at::Tensor>& stashed, bool repeated) const;
  at::Tensor run_loss(const MicroBatchLoss& loss, const Batch& output, bool repeated) const;
  SeededScope seeded_scope(int order) const;

  const LocalPipeline& local_;
  const int range_;
  const int micro_batch_;
  const RunMode mode_;
};

}  // namespace torchspan::pipeline
