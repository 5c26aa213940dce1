#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pipeline/policies/policy.h"
#include "pipeline/runtime/layer_range_pass.h"
#include "pipeline/runtime/step_batch.h"

namespace torchspan::pipeline {

/// What one worker needs to run a step.
struct StepWork {
  StepBegin begin;
  const schedule::Table* table = nullptr;  ///< the order of actions; null: order of arrival
  Batch input;                             ///< on the worker of the first layer range
  Batch target;                            ///< on the worker of the last layer range, if there is a loss
  const Loss* loss = nullptr;
  Future<void> before_first_backward = {};
  Cache::State* cache = nullptr;           ///< that the step continues; null: none
  device::Offloader* offloader = nullptr;  ///< of activations; null: they stay where they are
};

/// What a worker waits for. Every wait makes one, so it refers to a text that lives as long as the pipeline.
struct Awaited {
  std::string_view name;  ///< begins with "wait for "
  int micro_batch = -1;   ///< -1: not for one
  friend bool operator==(const Awaited&, const Awaited&) = default;
};

/// The passes of one step on this worker: takes what arrives for them, runs them, and gives what they return to the next
/// ones, here or on other workers. Reports the actions that become ready. Used by the training thread.
class Passes {
 public:
  /// Splits the input, on the worker of the first layer range. `work` and `policy` must outlive this.
  Passes(const LocalPipeline& local, StepWork& work, Policy& policy);
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;

  void forward(int range, int micro_batch);
  /// Runs a kBackward, or a kInputGradient, the part of it that computes the gradients of inputs.
  void backward(const schedule::Action& action);
  void weight_gradient(int range, int micro_batch);
  /// The pass of the next backward, if that is known and the pass has begun; null otherwise.
  LayerRangePass* next_backward();

  /// Takes a message of another worker, or of a layer range of this one. Throws Error{kInvalid} for a link or a micro-batch
  /// that does not end on this worker.
  void accept(Activations& event);
  void accept(Gradients& event);
  /// Gives the backwards the gradients of the whole output, one per member; on the worker of the last layer range.
  void put_output_gradients(const std::vector<at::Tensor>& gradients);

  /// What the oldest pass lacks.
  Awaited awaited() const;
  /// The same as a text, for an error.
  std::string waiting_for() const;
  /// Passes whose activations the worker holds, and the most of them until now.
  int live() const { return live_; }
  int peak() const { return peak_; }
  StepInput& input() { return input_; }
  StepOutput& output() { return output_; }
  /// What the layers left in the cache.
  CacheTensors take_cache() { return std::move(cache_); }

 private:
  LayerRangePass& at(int range, int micro_batch);
  void check_backward(int range, int micro_batch);
  void end_pass(int range, int micro_batch);
  const Link* find_link(int link, int micro_batch) const;
  int worker_of(int range) const { return local_.plan.layer_ranges[static_cast<std::size_t>(range)].worker; }

  const LocalPipeline& local_;
  const StepWork& work_;
  Policy& policy_;
  CacheTensors cache_;
  const RunMode mode_;  ///< of all passes, but for `recompute`
  StepInput input_;
  StepOutput output_;
  std::map<std::pair<int, int>, std::unique_ptr<LayerRangePass>> passes_;  ///< by layer range, micro-batch
  int live_ = 0;  ///< passes between their forward and their end
  int peak_ = 0;
};

}  // namespace torchspan::pipeline
