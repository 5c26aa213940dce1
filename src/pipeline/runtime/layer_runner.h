#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <torchspan/pipeline/pipeline.h>

#include "core/api/step_part.h"
#include "device/api/offload.h"
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

/// The input of one use of a layer.
struct UseInput {
  Batch batch;
  std::map<std::string, at::Tensor> pops;
};

/// The output of one use of a layer.
struct UseOutput {
  Batch batch;
  std::map<std::string, at::Tensor> stashed;
};

class RepeatedUses;

/// How the passes of a step run.
struct RunMode {
  std::uint64_t step = 0;
  bool gradients = false;         ///< a backward will come
  bool recompute = false;         ///< keeps only inputs and recomputes the forward for the backward
  CacheTensors* cache = nullptr;  ///< what layers keep between steps; null: nothing
  std::uint64_t random_step = 0;  ///< in seed_of_use()
  device::Offloader* offloader =
      nullptr;  ///< of the inputs until `recompute`; null: they stay where they are
  const char* unordered =
      nullptr;  ///< why its order depends on when messages arrive (StepPartScope); null: it does not
};

/// Runs the layers of one layer range on one micro-batch. Errors name the layer and the micro-batch. Used by
/// the training thread.
class LayerRunner {
 public:
  LayerRunner(const LocalPipeline& local, int range, int micro_batch, const RunMode& mode)
      : local_(local), range_(range), micro_batch_(micro_batch), mode_(mode) {}

  /// `inputs` are by link; `repeated` if activation checkpointing recomputes the forward. `selected` runs the uses that
  /// it selects; null: none.
  LayerRangeOutputs run(const std::map<int, Activation>& inputs, const std::optional<MicroBatchLoss>& loss,
                        bool repeated, RepeatedUses* selected = nullptr) const;
  /// Runs one use of a layer. Throws an Error that names it.
  UseOutput run_use(int order, const UseInput& input, bool repeated) const;
  /// What an operation of a group that the layers call belongs to.
  StepPart part(StepPart::Kind kind) const {
    return {.kind = kind, .layer_range = range_, .micro_batch = micro_batch_, .step = mode_.step};
  }
  int range_index() const { return range_; }
  int micro_batch() const { return micro_batch_; }
  const LayerRange& range() const { return local_.plan.layer_ranges[static_cast<std::size_t>(range_)]; }
  /// Whether any parameter of the layers requires a gradient.
  bool any_layer_learns() const;
  /// The same for the layer of one use.
  bool layer_learns(int order) const;
  /// Wraps the current exception into an Error that names `where`.
  [[noreturn]] void fail(const std::string& where, const char* phase) const;
  /// Throws fail() for the whole layer range.
  [[noreturn]] void fail_range(const char* phase) const;
  /// Throws an Error of the user's, with `text`, that names one use.
  [[noreturn]] void fail_use(int order, const char* phase, const char* text) const;

 private:
  at::Tensor run_loss(const MicroBatchLoss& loss, const Batch& output, bool repeated) const;
  SeededScope seeded_scope(int order) const;

  const LocalPipeline& local_;
  const int range_;
  const int micro_batch_;
  const RunMode mode_;
};

}  // namespace torchspan::pipeline
