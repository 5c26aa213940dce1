#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "pipeline/runtime/action_runner.h"
#include "pipeline/runtime/constants_watch.h"
#include "pipeline/runtime/stall_watch.h"
#include "pipeline/runtime/step_closing.h"
#include "pipeline/runtime/step_state.h"

namespace torchspan::pipeline {

/// The step after one that has not ended, of which it runs actions while it would wait.
class NextStep {
 public:
  virtual ~NextStep() = default;
  /// Runs an action if one may run while the earlier step holds the activations of `held` passes. Does not throw.
  virtual bool run_one(int held) = 0;
  /// Takes an event of the next step. Does not throw.
  virtual void accept(StepEvent& event) = 0;
};

/// One step on one worker: takes events, lets actions run in the order of the policy, and ends the step with the other
/// workers. The same for all workers. Used by the training thread.
class Step {
 public:
  Step(const LocalPipeline& local, StepWork work);

  const StepBegin& begin() const { return state_.work.begin; }
  /// Runs this worker's forwards (or, if `backwards`, backwards) of a StepKind::kForward, or its part of any
  /// other step. Throws the error that ends the step.
  void run_part(bool backwards);
  /// Runs a whole step to its end on all workers. `next` gets the events of the next step; null: none has begun.
  void run_to_end(NextStep* next);
  /// The action that may run now, while the step before this one has not ended and holds the activations of `held`
  /// passes: a forward only if both then hold at most what the schedule needs for one. Run it with run_early().
  std::optional<schedule::Action> next_early(int held) {
    return state_.policy->next_within(held + state_.record.live());
  }
  void run_early(const schedule::Action& action);
  /// Takes an event of this step. Throws the error that ends the step.
  void accept(StepEvent& event);
  /// Waits until all workers have run their part.
  void meet();
  /// Runs the backward before the input, then synchronizes with the other workers: the end of the step.
  void close();

  /// Returns the whole output, on the worker of the last layer range.
  Batch output() { return state_.output.take(); }
  /// Gives the backwards the gradients of the whole output, one per member.
  void put_output_gradients(const std::vector<at::Tensor>& gradients);
  double loss() const { return state_.loss; }
  /// Keeps what the layers left in the cache; after close().
  void commit_cache();
  StepReport report() const { return closing_.report(state_.split.micro_batches(), state_.work.table); }

 private:
  void run(const schedule::Action& action);
  void hold_first_backward();
  void finish_exchange();
  bool run_next_step();
  Awaited awaited() const;
  void wait();
  void take_events();

  const LocalPipeline& local_;
  StepState state_;
  ActionRunner runner_;
  StallWatch watch_;
  const ConstantsWatch constants_;
  StepClosing closing_;
  NextStep* next_ = nullptr;
  bool backwards_begun_ = false;
  /// While the forwards of a StepKind::kForward end: reports of workers that left forward() earlier and do not call
  /// backward(). They end the backwards of this worker, but not its forward().
  std::optional<std::deque<StepEvent>> abandonments_;
};

}  // namespace torchspan::pipeline
