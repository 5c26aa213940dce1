#pragma once
#include <torchspan/pipeline/pipeline.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// The end of a part of a step: the first worker gathers the parts of all workers, the others wait for the
/// result.
class StepClosing {
 public:
  StepClosing(const LocalPipeline& local, StepId id);

  /// First worker: adds the part of a worker.
  void add(const PartDone& part);
  /// Other workers: takes the result.
  void set(StepClosed result);
  bool complete() const;
  /// Begins to wait for the next part of the step.
  void reset();
  /// Valid once complete() was true; stays after reset().
  const StepClosed& result() const { return result_; }
  /// `table` is the step's schedule; null: order of arrival.
  StepReport report(int micro_batches, const schedule::Table* table) const;

 private:
  const LocalPipeline& local_;
  StepClosed result_;
  int parts_ = 0;        ///< on the first worker
  bool closed_ = false;  ///< on the others
};

}  // namespace torchspan::pipeline
