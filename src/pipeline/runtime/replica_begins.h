#pragma once
#include <cstdint>
#include <map>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// What each replica does in one step. The replicas send it to each other when the step begins, so that one that calls
/// another function, or passes other options, ends the step at once. Used by the training thread.
class ReplicaBegins {
 public:
  ReplicaBegins(const LocalPipeline& local, const StepBegin& begin);

  /// Throws Error{kInvalid} for an event that no other replica sends, and for a step that differs from this one's; the
  /// text names both workers and the difference.
  void accept(const ReplicaBegin& event);
  /// Whether all replicas are known.
  bool complete() const { return static_cast<int>(rows_.size()) == local_.grid.count(); }
  std::int64_t own_rows() const { return rows_.at(local_.grid.mine); }
  /// The rows of this replica's batch over the mean rows of all batches; once complete().
  double own_weight() const;

 private:
  const LocalPipeline& local_;
  const StepId id_;
  const StepKind kind_;
  const double gradient_scale_;
  const bool no_sync_;
  std::map<int, std::int64_t> rows_;  ///< by replica
};

/// Sends what this replica does in a step to all workers of the other replicas; on its first worker.
void announce_to_replicas(const LocalPipeline& local, const StepBegin& begin);

}  // namespace torchspan::pipeline
