#pragma once
#include <string>

#include "pipeline/runtime/step_state.h"

namespace torchspan::pipeline {

/// Runs the actions of one step on this worker: its passes, and what they receive and send. Used by the training thread.
class ActionRunner {
 public:
  ActionRunner(const LocalPipeline& local, StepState& state) : local_(local), state_(state) {}

  void run(const schedule::Action& action);
  /// Repeats the forward of the next backward, while nothing else can run. Returns false if there is none.
  bool recompute_ahead();

 private:
  void run_forward(int range, int micro_batch);
  void end_without_backward(int range, int micro_batch);
  /// Runs a whole backward, or its part for inputs.
  void run_backward(const schedule::Action& action);
  void run_weight_gradient(int range, int micro_batch);
  void prefetch_next();
  std::string describe(const schedule::Action& action) const;

  const LocalPipeline& local_;
  StepState& state_;
};

}  // namespace torchspan::pipeline
