#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/policies/policy.h"
#include "pipeline/runtime/layer_range_pass.h"
#include "pipeline/runtime/step_record.h"

namespace torchspan::pipeline {

/// What the passes of a step use besides the pipeline; see RunMode.
struct PassResources {
  CacheTensors* cache = nullptr;
  device::Offloader* offloader = nullptr;
};

/// The passes of one step on this worker. Routes activations and gradients between them and to other workers,
/// and reports the actions that become ready. Used by the training thread.
class StepPasses {
 public:
  /// `resources` are those of the mode of all passes.
  StepPasses(const LocalPipeline& local, const StepBegin& begin, Policy& policy,
             const PassResources& resources);

  /// The pass of a micro-batch through a layer range of this worker; created at its first use.
  LayerRangePass& at(int range, int micro_batch);
  /// Null: not created yet, or erased.
  LayerRangePass* find(int range, int micro_batch);
  void erase(int range, int micro_batch) { passes_.erase({range, micro_batch}); }

  /// Gives an activation to the layer range at the end of `link`, here or on another worker.
  void deliver(int link, int micro_batch, Activation activation);
  /// Gives gradients to the layer range at the start of `link`, here or on another worker.
  void deliver_gradients(int link, int micro_batch, std::vector<at::Tensor> gradients);
  /// Takes a message. Throws Error{kInvalid} for a link or a micro-batch that does not end on this worker.
  void accept(Activations& event);
  void accept(Gradients& event);
  /// Reports the backward of a pass if it is ready.
  void check_backward(int range, int micro_batch);
  /// What the oldest pass lacks.
  Awaited awaited() const;
  /// The same as a text, for an error.
  std::string waiting_for() const;

 private:
  bool is_known(int link, int micro_batch) const;
  const LayerRange& range_of(int range) const {
    return local_.plan.layer_ranges[static_cast<std::size_t>(range)];
  }

  const LocalPipeline& local_;
  const StepId id_;
  const int micro_batches_;
  const std::uint64_t random_step_;
  const bool has_backwards_;
  const char* const unordered_;
  Policy& policy_;
  const PassResources resources_;
  std::map<std::pair<int, int>, std::unique_ptr<LayerRangePass>> passes_;  ///< by layer range, micro-batch
};

}  // namespace torchspan::pipeline
