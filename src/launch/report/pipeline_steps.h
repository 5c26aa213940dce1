#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <torchspan/schedule.h>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// The pipeline of a run: all steps in figures, one step of median length in full.
struct PipelineFigures {
  std::uint64_t steps = 0;
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

/// Parses "2F5", the inverse of schedule::to_string(); nullopt for other text.
std::optional<schedule::Action> parse_action(const std::string& text);

}  // namespace torchspan::launch
