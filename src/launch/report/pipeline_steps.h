#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/schedule.h>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

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

}  // namespace torchspan::launch
