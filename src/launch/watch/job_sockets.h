#pragma once
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/rendezvous.h>

#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// Returns the folder of a running job of this user: `job` if that is a folder, else the one whose name ends so, else
/// the only one. Throws Error{kInvalid} that lists the jobs.
std::string find_job(const std::string& job, const rendezvous::Environment& environment);

/// Asks all workers of a job for their state, by rank; those that do not answer within `timeout` are marked. Throws
/// Error{kInvalid} if the job has no worker that can be asked.
std::vector<WorkerReport> ask_workers(Executor& executor, const std::string& folder, Duration timeout);

}  // namespace torchspan::launch
