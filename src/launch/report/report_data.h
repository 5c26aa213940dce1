#pragma once
#include <cstddef>
#include <string>

#include "launch/report/comparison.h"

namespace torchspan::launch {

/// Encodes a run for the report's script as JSON that may stand in an HTML script element: times in
/// nanoseconds, spans as columns with differences. At most `most_spans` spans, the longest. `comparison` with an earlier
/// run may be null.
std::string encode_report(const TraceSet& set, const RunFigures& figures, std::size_t most_spans,
                          const RunComparison* comparison = nullptr);

}  // namespace torchspan::launch
