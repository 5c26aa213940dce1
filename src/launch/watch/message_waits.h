#pragma once
#include <functional>
#include <string>
#include <vector>

#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// Returns what a worker does, in a few words.
using DescribeOccupation = std::function<std::string(const WorkerReport&)>;

/// The oldest send() or recv() in which each worker has waited for `least_seconds` or more: one text each, which says
/// what the rank that could end the wait does; for a recv() from any rank, what each rank of its group does.
std::vector<std::string> find_message_waits(const std::vector<WorkerReport>& workers, double least_seconds,
                                            const DescribeOccupation& occupation);

}  // namespace torchspan::launch
