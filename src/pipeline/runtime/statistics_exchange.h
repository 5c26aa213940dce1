#pragma once
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Exchanges what this worker's StepStatistics modules gather in one step with the other replicas of its stages, so
/// that all commit the statistics of all batches. Does nothing without such modules. Used by the training thread.
class StatisticsExchange {
 public:
  StatisticsExchange(const LocalPipeline& local, StepId id);

  /// Sends what the modules have gathered; after the last forward.
  void send();
  /// Throws Error{kInvalid} for an event that no replica of this stage sends.
  void accept(ReplicaStatistics& event);
  bool complete() const;
  /// Gives the modules what all replicas have gathered; once.
  void finish();

 private:
  const LocalPipeline& local_;
  const StepId id_;
  std::vector<StepStatistics*> modules_;  ///< owned by the layers; empty with one replica
  std::map<int, std::vector<std::vector<at::Tensor>>> parts_;  ///< by replica, by module
  bool sent_ = false;
};

}  // namespace torchspan::pipeline
