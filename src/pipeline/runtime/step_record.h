#pragma once
#include <algorithm>
#include <vector>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Records the actions that this worker runs in a step, and the passes whose activations it holds.
class StepRecord {
 public:
  StepRecord(const LocalPipeline& local, const StepBegin& begin)
      : local_(local), id_(begin.id), start_(begin.arrived) {}

  void pass_began() { peak_ = std::max(peak_, ++live_); }
  void pass_ended() { --live_; }
  /// Records an action that ends now, here and in the worker's spans.
  void add(const schedule::Action& action, TimePoint begin) {
    const TimePoint end = local_.executor().now();
    ran_.push_back({action.kind, action.stage, action.micro_batch, (begin - start_).count(),
                    (end - start_).count(), live_});
    local_.worker.runtime().spans.record(SpanKind::kPipeline, schedule::to_string(action), begin,
                                         SpanLink{.id = id_.step, .part = action.micro_batch});
  }
  PartDone part(double loss) const { return {id_, local_.me, loss, peak_, ran_}; }

 private:
  const LocalPipeline& local_;
  const StepId id_;
  const TimePoint start_;
  int live_ = 0;  ///< passes between their forward and their end
  int peak_ = 0;
  std::vector<RanAction> ran_;
};

}  // namespace torchspan::pipeline
