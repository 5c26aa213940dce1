#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// A part of a worker's time, in nanoseconds since the beginning of the trace.
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t length() const { return end - begin; }
};

/// A training step on all workers that took part in it.
struct TrainingStep {
  std::uint64_t number = 0;
  std::vector<Interval> by_worker;  ///< by index into TraceSet::workers; empty intervals for absent workers
  Interval whole;                   ///< from the first beginning to the last end
};

struct TrainingSteps {
  std::string
      source;  ///< "spans named step", "reductions", "pipeline steps", "reports of progress"; empty: no steps
  std::vector<TrainingStep> steps;
};

/// Finds the steps of a run: spans named "step" if the program has any, else reductions of
/// DistributedDataParallel, else steps of a pipeline, else the times between reports of Progress.
TrainingSteps find_steps(const TraceSet& set);

/// Total length of a set of intervals that may overlap.
std::int64_t union_length(std::vector<Interval> intervals);

}  // namespace torchspan::launch
