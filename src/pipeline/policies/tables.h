#pragma once
#include <map>
#include <memory>
#include <utility>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// The tables that a pipeline's steps follow, made once for each number of micro-batches.
class Tables {
 public:
  explicit Tables(const LocalPipeline& local) : local_(local) {}

  /// Throws Error{kInvalid} when the schedule does not fit the plan.
  void check() const;
  /// Null: the order of arrival.
  const schedule::Table* find(StepKind kind, int micro_batches);

 private:
  schedule::Table make(StepKind kind, int micro_batches) const;
  bool is_looped() const;

  const LocalPipeline& local_;
  std::map<std::pair<StepKind, int>, std::unique_ptr<schedule::Table>> made_;
};

}  // namespace torchspan::pipeline
