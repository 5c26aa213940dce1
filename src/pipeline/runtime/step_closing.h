#pragma once
#include <map>
#include <utility>

#include <torchspan/pipeline/pipeline.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

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
  /// `table` is the step's schedule; null: order of arrival.
  StepReport report(int micro_batches, const schedule::Table* table) const;

 private:
  int replicas_done() const;
  /// The mean over the rows of all replicas.
  void average_losses();

  const LocalPipeline& local_;
  std::int64_t rows_ = 0;
  StepClosed result_;
  int part_ = 0;   ///< that ends now
  int parts_ = 0;  ///< on the first worker
  std::map<std::pair<int, int>, ReplicaDone>
      dones_;            ///< on the first worker, by part of the step and replica
  bool closed_ = false;  ///< on the others
};

}  // namespace torchspan::pipeline
