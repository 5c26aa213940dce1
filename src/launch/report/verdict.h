#pragma once
#include <optional>
#include <string>
#include <vector>

#include "launch/report/figures.h"

namespace torchspan::launch {

/// All figures of a run.
struct RunFigures {
  TrainingSteps steps;
  Reductions reductions;
  Calls calls;
  std::optional<PipelineFigures> pipeline;
  std::vector<ModuleFigures> modules;
  std::vector<CollectiveFigures> collectives;
};

RunFigures examine_run(const TraceSet& set);

/// One cause that limits the run.
struct RunFinding {
  double share = 0;    ///< of a rank's time, 0 to 1
  std::string text;    ///< a sentence with its figures
  std::string advice;  ///< what to look at next
};

/// What limits the run, the largest share first. Causes below 5 % are left out.
std::vector<RunFinding> judge_run(const TraceSet& set, const RunFigures& figures);

/// "12.3 ms", "1.50 s", "870 ns".
std::string format_time(double nanoseconds);
/// "4.2 MiB".
std::string format_bytes(std::uint64_t bytes);

}  // namespace torchspan::launch
