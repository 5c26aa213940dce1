#pragma once
#include <map>
#include <memory>
#include <utility>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// The schedules of a pipeline's steps; computed once for each kind of step and number of micro-batches.
class Tables {
 public:
  explicit Tables(const LocalPipeline& local) : local_(local) {}

  /// Throws Error{kInvalid} if the schedule does not fit the plan.
  void check() const;
  /// The table of PipelineOptions::custom_schedule. Throws Error{kInvalid} if it does not fit the plan, or as
  /// schedule::validate().
  schedule::Table custom(int micro_batches) const;
  /// Returns null for Schedule::kArrival. The table lives as long as this.
  const schedule::Table* find(StepKind kind, int micro_batches);

 private:
  schedule::Table make(StepKind kind, int micro_batches) const;

  const LocalPipeline& local_;
  std::map<std::pair<StepKind, int>, std::unique_ptr<schedule::Table>> made_;
};

}  // namespace torchspan::pipeline
