#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

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

}  // namespace torchspan::launch
