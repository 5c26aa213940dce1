#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/runtime/passes.h"
#include "pipeline/runtime/step_exchange.h"

namespace torchspan::pipeline {

class OverlappedSteps;

/// The end of a part of a step: the first worker gathers the parts of all workers, then exchanges losses with the first
/// workers of the other replicas; the others wait for the result.
class StepClosing {
 public:
  StepClosing(const LocalPipeline& local, const StepBegin& begin);

  /// First worker: adds the part of a worker. After the last one, sends the replica's part to the other replicas.
  void add(const PartDone& part);
  /// First worker: adds the part of another replica. Throws Error{kInvalid} for an event that no replica sends.
  void add(const ReplicaDone& done);
  /// Other workers: takes the result.
  void set(StepClosed result);
  bool complete() const;
  /// The part of the step that ends now: 1 for the backwards of a StepKind::kForward, otherwise 0.
  int part() const { return part_; }
  /// Begins to wait for the next part of the step.
  void reset();
  /// Valid once complete() was true; stays after reset().
  const StepClosed& result() const { return result_; }

 private:
  /// The mean over the rows of all replicas.
  void average_losses();

  const LocalPipeline& local_;
  const std::int64_t rows_;
  StepClosed result_;
  int part_ = 0;   ///< that ends now
  int parts_ = 0;  ///< on the first worker
  std::map<std::pair<int, int>, ReplicaDone>
      dones_;            ///< on the first worker, by part of the step and replica
  bool closed_ = false;  ///< on the others
};

/// One step on one worker: takes events, lets actions run in the order of the policy, and ends the step with the other
/// workers. The same for all workers. Used by the training thread.
class Step {
 public:
  Step(const LocalPipeline& local, StepWork work);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  const StepBegin& begin() const { return work_.begin; }
  /// Runs this worker's forwards (or, if `backwards`, backwards) of a StepKind::kForward, or its part of any
  /// other step. Throws the error that ends the step.
  void run_part(bool backwards);
  /// Runs a whole step to its end on all workers. `overlap` gets the events of the next step and runs its actions while this
  /// one would wait; null: none has begun.
  void run_to_end(OverlappedSteps* overlap);
  /// The action that may run now, while the step before this one has not ended and holds the activations of `held`
  /// passes: a forward only if both then hold at most what the schedule needs for one. Run it with run_early().
  std::optional<schedule::Action> next_early(int held) { return policy_->next_within(held + passes_.live()); }
  void run_early(const schedule::Action& action);
  /// Takes an event of this step. Throws the error that ends the step.
  void accept(StepEvent& event);
  /// Waits until all workers have run their part.
  void await_workers();
  /// Runs the backward before the input, then synchronizes with the other workers: the end of the step.
  void close();

  /// Returns the whole output, on the worker of the last layer range.
  Batch output() { return passes_.output().take(); }
  /// Gives the backwards the gradients of the whole output, one per member.
  void put_output_gradients(const std::vector<at::Tensor>& gradients);
  double loss() const { return loss_; }
  /// Keeps what the layers left in the cache; after close().
  void commit_cache();
  StepReport report() const;

 private:
  void run(const schedule::Action& action);
  bool recompute_ahead();
  void hold_first_backward();
  void check_constants() const;
  void backward_before_input();
  bool run_next_step();
  Awaited awaited() const;
  void wait();
  template <class Done>
  void wait_until(const Done& done);
  void take_events();

  const LocalPipeline& local_;
  StepWork work_;
  const std::unique_ptr<Policy> policy_;
  Passes passes_;
  StepExchange exchange_;
  StepClosing closing_;
  StallWatch watch_;
  std::vector<std::uint32_t>
      constant_versions_;  ///< of LocalPipeline::constants, which a step must not change
  OverlappedSteps* overlap_ = nullptr;
  bool backwards_begun_ = false;
  double loss_ = 0;  ///< of the whole step, after its end
  std::vector<RanAction> ran_;
  std::optional<SpanScope> shown_;  ///< of the action that runs, or of the wait
  Awaited awaited_;                 ///< by the wait that is shown
  /// While the forwards of a StepKind::kForward end: reports of workers that left forward() earlier and do not call
  /// backward(). They end the backwards of this worker, but not its forward().
  std::optional<std::deque<StepEvent>> abandonments_;
};

}  // namespace torchspan::pipeline
