#pragma once
#include <set>
#include <vector>

#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// Returns the ranks of the group with this number among `workers` (-1: all workers): the whole job, a range of ranks
/// or every n-th rank if that gives the number, else the workers that are seen in an operation of the group. Pure.
std::set<int> members_of_group(int number, const std::vector<WorkerReport>& workers);

}  // namespace torchspan::launch
