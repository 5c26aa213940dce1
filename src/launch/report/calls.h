#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

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

}  // namespace torchspan::launch
