#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "launch/report/steps.h"

namespace torchspan::launch {

/// How one worker spends the steps of data-parallel training, in nanoseconds in all.
struct ReductionTimes {
  int rank = 0;
  std::uint64_t rounds = 0;
  std::int64_t whole = 0;  ///< all steps
  std::int64_t forward = 0;
  std::int64_t backward = 0;   ///< from the first gradient to the end of the pass
  std::int64_t late_peer = 0;  ///< after backward, until the last worker starts its last bucket
  std::int64_t transfer = 0;   ///< after that, until all buckets are reduced
  std::int64_t other() const { return whole - forward - backward - late_peer - transfer; }
};

/// A worker that waits for a bucket that another starts last.
struct LateBucket {
  int waits = 0;  ///< rank
  int late = 0;   ///< rank
  int bucket = 0;
  std::int64_t time = 0;
  std::uint64_t rounds = 0;
};

struct BucketFigures {
  std::uint64_t bytes = 0;
  std::uint64_t rounds = 0;
  std::int64_t duration = 0;          ///< from the last worker's start to the end, in all
  std::int64_t skew = 0;              ///< from the first worker's start to the last's, in all
  std::int64_t hidden = 0;            ///< part of `duration` before the last backward ends
  std::map<int, std::uint64_t> last;  ///< rounds in which a rank started last
};

struct Reductions {
  std::vector<ReductionTimes> workers;
  std::vector<LateBucket> late;  ///< longest first
  std::map<int, BucketFigures> buckets;
};

/// Compares the workers' buckets, round by round. Uses the rounds that all workers recorded.
Reductions examine_reductions(const TraceSet& set, const TrainingSteps& steps);

}  // namespace torchspan::launch
