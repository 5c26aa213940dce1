#pragma once
#include <cstdint>
#include <iosfwd>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// What was written.
struct ChromeJsonReport {
  std::uint64_t spans = 0;
  std::uint64_t profiler_events = 0;
  std::uint64_t left_out = 0;  ///< the shortest spans and events, above the limit
  std::int64_t shortest = 0;   ///< nanoseconds of the shortest one that was written, if some were left out
  std::uint64_t arrows = 0;
};

/// Writes the trace in Chrome's JSON format, which ui.perfetto.dev opens: a process for each rank, a row for each
/// thread and kind, arrows between callers and handlers, curves for scalars and counters, and the events of
/// attached profiles. Writes at most `most_spans` spans and events.
ChromeJsonReport write_chrome_json(const TraceSet& set, std::ostream& out, std::uint64_t most_spans);

}  // namespace torchspan::launch
