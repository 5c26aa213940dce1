#pragma once
#include <cstddef>
#include <vector>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// One span of one worker.
struct SpanPlace {
  std::size_t worker = 0;  ///< index into TraceSet::workers
  std::size_t span = 0;
};

/// A call and the handler that served it, or gradients that one worker sent and another received.
struct Flow {
  SpanPlace from;
  SpanPlace to;
  bool returns = false;  ///< the first worker waits for the end of the second's span
};

/// Finds the related spans of different workers. Ambiguous ones, such as calls of a rank that was replaced, are left
/// out.
std::vector<Flow> find_flows(const TraceSet& set);

}  // namespace torchspan::launch
