#pragma once
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "pipeline/policies/policy.h"
#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// The actions of one step on this worker: picks the next one through a policy, and counts those left. The
/// backwards of a StepKind::kForward run after begin_backwards(). Used by the training thread.
class ReadyActions {
 public:
  /// `table` is the schedule, which must outlive this; null: order of arrival.
  ReadyActions(const LocalPipeline& local, const StepBegin& begin, const schedule::Table* table);

  /// Starts the second part of a StepKind::kForward.
  void begin_backwards();
  /// A kBackward stands for the kInputGradient of a micro-batch whose backward the table splits.
  void became_ready(schedule::Action action);
  /// The action to run now; nullopt: none may run yet. Call ended() after it.
  std::optional<schedule::Action> next();
  /// The same if after it the worker holds at most the passes that the table needs; it holds `live` now. Needs a table.
  std::optional<schedule::Action> next_within(int live);
  void ended() { --left_; }
  bool any_left() const { return left_ > 0; }
  /// The next backward, if it is known and may run in this part.
  std::optional<schedule::Action> next_backward() const;
  /// A micro-batch left the pipeline without a backward.
  void credit() { policy_->credit(); }

 private:
  /// This worker's row of the table; of a StepKind::kForward, that of one part.
  std::vector<schedule::Action> row(bool backwards) const;
  /// Most passes that this worker holds at once if it follows the table.
  int most_live() const;
  void begin(bool backwards);

  const LocalPipeline& local_;
  const StepKind kind_;
  const int micro_batches_;
  const schedule::Table* const table_;
  std::unique_ptr<Policy> policy_;
  std::optional<schedule::Action> held_;  ///< the next one, which next_within() did not allow
  int left_ = 0;                          ///< actions of this part that have not ended
  std::set<schedule::Action> split_;      ///< the table's kInputGradients on this worker
  bool backwards_allowed_ = false;
  std::vector<schedule::Action> early_;  ///< backwards that became ready before begin_backwards()
};

}  // namespace torchspan::pipeline
