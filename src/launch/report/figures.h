#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/schedule.h>

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

/// The pipeline of a run: all steps in figures, one step of median length in full.
struct PipelineFigures {
  std::uint64_t steps = 0;
  std::uint64_t left_out = 0;   ///< steps without a backward, if others have one: evaluation, generation
  double idle = 0;              ///< share of all workers' time in the steps, averaged
  std::uint64_t shown = 0;      ///< id of the step below
  std::vector<int> ranks;       ///< by row of the timelines
  schedule::Timeline measured;  ///< of that step
  std::optional<schedule::Timeline>
      simulated;  ///< its actions at their mean costs, without transfers; none if
                  ///< the trace lacks some of them
};

/// Returns nullopt if the run has no pipeline.
std::optional<PipelineFigures> examine_pipeline(const TraceSet& set);

/// Returns the ids of the steps that reports measure: those with a backward, or all if none has one.
std::set<std::uint64_t> measured_pipeline_steps(const TraceSet& set);

/// Parses "2F5", the inverse of schedule::to_string(); nullopt for other text.
std::optional<schedule::Action> parse_action(const std::string& text);

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

/// The time that one rank had collective operations under way, in nanoseconds.
struct CollectiveFigures {
  int rank = 0;
  std::int64_t under_way = 0;
  std::string longest;  ///< the operation with the largest sum
  std::map<int, std::int64_t>
      later;  ///< the part in which another rank had not started one, by the last rank
};

/// Returns the figures of every rank. An operation that does not block may overlap with computation.
std::vector<CollectiveFigures> examine_collectives(const TraceSet& set);

/// Latencies of one function, in nanoseconds.
struct FunctionFigures {
  std::string name;
  std::uint64_t calls = 0;                      ///< seen by callers
  std::uint64_t served = 0;                     ///< seen by handlers
  std::int64_t p50 = 0, p99 = 0, longest = 0;   ///< from the call to its result
  std::int64_t served_p50 = 0, served_p99 = 0;  ///< of the handler alone
  std::int64_t total = 0;                       ///< sum over all calls
};

/// What one rank sent another in calls and replies.
struct TrafficFigures {
  std::uint64_t bytes = 0;
  std::uint64_t messages = 0;
};

/// Time that a caller had at least one call to a callee under way, and that the callee spent in its handlers.
struct CallerFigures {
  int caller = 0;
  int callee = 0;
  std::int64_t waiting = 0;
  std::int64_t served = 0;
  std::string longest;  ///< the function with the largest sum
};

/// Handlers of one function that run at the same time on one worker, and yet end one after another.
struct SerializedHandlers {
  int rank = 0;
  std::string name;
  double at_a_time = 0;       ///< handlers that run, averaged over the time in which one runs
  std::int64_t interval = 0;  ///< between two ends, while handlers run
  std::int64_t closest = 0;   ///< distance of two ends that 90 % of them exceed
  std::int64_t busy = 0;      ///< time in which at least one runs
};

struct Calls {
  std::vector<FunctionFigures> functions;                 ///< largest total first
  std::map<std::pair<int, int>, TrafficFigures> traffic;  ///< by sender and receiver
  std::vector<CallerFigures> callers;                     ///< largest waiting time first
  std::vector<SerializedHandlers> serialized;             ///< largest busy time first
};

Calls examine_calls(const TraceSet& set);

/// The smallest element that is at least as large as `share` of all; 0 for none. Reorders `values`.
std::int64_t percentile(std::vector<std::int64_t>& values, double share);

/// Durations of the forwards or the backwards of one module on all ranks, in nanoseconds.
struct ModuleTimes {
  std::uint64_t count = 0;
  std::int64_t p50 = 0;
  std::int64_t total = 0;
};

/// A module that the program named (engine/operator_trace.h). The times of a module contain those of the modules inside it.
struct ModuleFigures {
  std::string name;
  ModuleTimes forward, backward;
};

/// The modules of a run, the largest sum of forwards and backwards first.
std::vector<ModuleFigures> examine_modules(const TraceSet& set);

}  // namespace torchspan::launch
