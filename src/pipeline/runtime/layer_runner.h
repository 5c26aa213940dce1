#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline.h>

#include "core/api/step_part.h"
#include "device/api/offload.h"
#include "engine/api/node_ptr.h"
#include "pipeline/layers/random.h"
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
  bool recompute = false;         ///< keeps only inputs and recomputes the forward for the backward
  CacheTensors* cache = nullptr;  ///< what layers keep between steps; null: nothing
  std::uint64_t random_step = 0;  ///< in seed_of_use()
  device::Offloader* offloader =
      nullptr;  ///< of the inputs until `recompute`; null: they stay where they are
  const char* unordered =
      nullptr;  ///< why its order depends on when messages arrive (StepPartScope); null: it does not
};

/// Detects layers and losses that change a tensor in place which a repeated forward needs unchanged.
class InPlaceWatch {
 public:
  /// Ignores tensors of inference mode, which have no version and cannot be changed outside of it.
  void add(const at::Tensor& tensor) {
    if (!tensor.is_inference()) versions_.emplace_back(tensor, version_of(tensor));
  }
  bool changed() const {
    return std::any_of(versions_.begin(), versions_.end(),
                       [](const auto& watched) { return version_of(watched.first) != watched.second; });
  }

 private:
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return static_cast<std::uint32_t>(tensor._version());
  }
  std::vector<std::pair<at::Tensor, std::uint32_t>> versions_;
};

/// Runs the layers of one layer range on one micro-batch. Errors name the layer and the micro-batch. Uses of
/// PipelineOptions::checkpoint_layers keep their inputs instead of their graphs; a node stands for each missing graph among
/// those of the other layers, so that one backward runs through all. Used by the training thread.
class LayerRunner {
 public:
  LayerRunner(const LocalPipeline& local, int range, int micro_batch, const RunMode& mode)
      : local_(local), range_(range), micro_batch_(micro_batch), mode_(mode) {}

  /// `inputs` are by link; `repeated` if activation checkpointing recomputes the forward.
  LayerRangeOutputs run(const std::map<int, Activation>& inputs, const std::optional<MicroBatchLoss>& loss,
                        bool repeated);
  /// Whether uses of checkpoint_layers have graphs to record.
  bool any_kept() const { return !kept_.empty(); }
  /// Runs the forwards of these uses again, in order, and links their graphs with those of the other layers.
  void repeat_kept();

  /// What an operation of a group that the layers call belongs to.
  StepPart part(StepPart::Kind kind) const {
    return {.kind = kind, .layer_range = range_, .micro_batch = micro_batch_, .step = mode_.step};
  }
  int range_index() const { return range_; }
  int micro_batch() const { return micro_batch_; }
  const LayerRange& range() const { return local_.plan.layer_ranges[static_cast<std::size_t>(range_)]; }
  /// Whether any parameter of the layers requires a gradient.
  bool any_layer_learns() const;
  /// Wraps the current exception into an Error that names the whole layer range.
  [[noreturn]] void fail_range(const char* phase) const;

 private:
  /// The input of one use of a layer with what it pops, or its output with what it stashed.
  struct UseData {
    Batch batch;
    std::map<std::string, at::Tensor> skips;
  };
  /// A use whose forward runs again.
  struct Kept {
    int order = 0;
    UseData input;
    std::optional<RandomState> random;  ///< without a seed
    InPlaceWatch watch;
    engine::NodePtr node;  ///< a KeptUseNode
  };
  template <class Visit>
  static void visit_differentiable(UseData& output, const Visit& visit);

  UseData run_use(int order, const UseData& input, bool repeated) const;
  /// Runs a use without recording its graph; records it if nothing in it can have a gradient that is known before.
  UseData run_and_keep(int order, UseData input);
  at::Tensor run_loss(const MicroBatchLoss& loss, const Batch& output, bool repeated) const;
  SeededScope seeded_scope(int order) const;
  bool layer_learns(int order) const;
  /// Whether this use keeps its input instead of its graph.
  bool keeps_input(int order) const;
  void check_unchanged(const Kept& kept, const char* phase) const;
  [[noreturn]] void fail(const std::string& where, const char* phase) const;
  [[noreturn]] void fail_use(int order, const char* phase, const char* text) const;

  const LocalPipeline& local_;
  const int range_;
  const int micro_batch_;
  const RunMode mode_;
  std::vector<Kept> kept_;
};

}  // namespace torchspan::pipeline
