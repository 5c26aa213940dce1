#pragma once
#include <string>
#include <vector>

#include "pipeline/policies/ready_actions.h"
#include "pipeline/runtime/cache_state.h"
#include "pipeline/runtime/constants_watch.h"
#include "pipeline/runtime/stall_watch.h"
#include "pipeline/runtime/step_closing.h"
#include "pipeline/runtime/step_exchange.h"
#include "pipeline/runtime/step_input.h"
#include "pipeline/runtime/step_output.h"
#include "pipeline/runtime/step_passes.h"
#include "pipeline/runtime/step_record.h"

namespace torchspan::pipeline {

/// What one worker needs to run a step.
struct StepWork {
  StepBegin begin;
  const schedule::Table* table = nullptr;  ///< the order of actions; null: order of arrival
  Batch input;                             ///< on the worker of the first layer range
  Batch target;                            ///< on the worker of the last layer range, if there is a loss
  const Loss* loss = nullptr;
  Future<void> before_first_backward = {};
  Cache::State* cache = nullptr;  ///< that the step continues; null: none
};

/// One step on one worker: takes events, runs the actions that the policy picks, and sends their results. The
/// same for all workers. Used by the training thread.
class Step {
 public:
  Step(const LocalPipeline& local, StepWork work);

  std::uint64_t id() const { return work_.begin.id.step; }
  /// Runs this worker's forwards (or, if `backwards`, backwards) of a StepKind::kForward, or its part of any
  /// other step. Throws the error that ends the step.
  void run_part(bool backwards);
  /// Waits until all workers have run their part.
  void meet();
  /// Runs the backward before the input, then meets: the end of the step.
  void close();

  /// Returns the whole output, on the worker of the last layer range.
  Batch output() { return output_.take(); }
  /// Gives the backwards the gradients of the whole output, one per member.
  void put_output_gradients(const std::vector<at::Tensor>& gradients);
  double loss() const { return loss_; }
  /// Keeps what the layers left in the cache; after close().
  void commit_cache();
  StepReport report() const { return closing_.report(split_.micro_batches(), work_.table); }

 private:
  void run(const schedule::Action& action);
  void run_forward(int range, int micro_batch);
  void end_without_backward(int range, int micro_batch);
  /// Runs a whole backward, or its part for inputs.
  void run_backward(const schedule::Action& action);
  void run_weight_gradient(int range, int micro_batch);
  void hold_first_backward();
  void finish_exchange();
  bool recompute_ahead();
  void wait();
  void take_events();
  std::string describe(const schedule::Action& action) const;
  StepId step_id() const { return work_.begin.id; }

  const LocalPipeline& local_;
  StepWork work_;
  const RowSplit split_;
  StallWatch watch_;
  const ConstantsWatch constants_;
  ReadyActions actions_;
  CacheTensors cache_;
  StepPasses passes_;
  StepInput input_;
  StepOutput output_;
  StepRecord record_;
  StepClosing closing_;
  StepExchange exchange_;
  bool backwards_begun_ = false;
  double loss_ = 0;
};

}  // namespace torchspan::pipeline
