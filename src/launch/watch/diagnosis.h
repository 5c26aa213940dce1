#pragma once
#include <string>
#include <vector>

#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// Returns what probably keeps the job from going on, the first suspect first: stopped or silent processes,
/// calls that wait for each other, ranks missing in an operation that others are in, and the worker that others
/// wait for while it waits for none. Ignores waits below `least_seconds`. Pure.
std::vector<std::string> find_suspects(const std::vector<WorkerReport>& workers, double least_seconds = 1);

/// Returns one page: the suspects, then what every worker does.
std::string format_diagnosis(const std::vector<WorkerReport>& workers);

}  // namespace torchspan::launch
