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

/// A call and the handler that served it, gradients that one worker sent and another received, two actions of a pipeline
/// that follow each other, or the rank that starts a reduction last and one that waits for it.
struct Flow {
  SpanPlace from;
  SpanPlace to;
  bool returns = false;  ///< the first worker waits for the end of the second's span
  bool from_end =
      false;  ///< it leaves when the second span begins or the first ends, not at the beginning of the first
  bool to_end = false;  ///< it arrives at the end of the second span, not its beginning
};

/// Finds the related spans of different workers. Ambiguous ones, such as calls of a rank that was replaced, are left
/// out.
std::vector<Flow> find_flows(const TraceSet& set);

}  // namespace torchspan::launch
