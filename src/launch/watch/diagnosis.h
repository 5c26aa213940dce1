#pragma once
#include <set>
#include <string>
#include <vector>

#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// Returns the ranks of the group with this number among `workers` (-1: all workers): the whole job, a range of ranks
/// or every n-th rank if that gives the number, else the workers that are seen in an operation of the group. Pure.
std::set<int> members_of_group(int number, const std::vector<WorkerReport>& workers);

/// Returns what probably keeps the job from going on, the first suspect first: stopped or silent processes,
/// calls that wait for each other, ranks missing in an operation that others are in, and the worker that others
/// wait for while it waits for none. Ignores waits below `least_seconds`. Pure.
std::vector<std::string> find_suspects(const std::vector<WorkerReport>& workers, double least_seconds = 1);

/// Returns one page: the suspects, then what every worker does.
std::string format_diagnosis(const std::vector<WorkerReport>& workers);

}  // namespace torchspan::launch
