#pragma once
#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/rendezvous.h>

#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// Returns the folder of a running job of this user: `job` if that is a folder, else the one whose name ends so, else
/// the only one. Throws Error{kInvalid} that lists the jobs.
std::string find_job(const std::string& job, const rendezvous::Environment& environment);

/// What the names of jobs' folders begin with.
inline constexpr std::string_view kJobPrefix = "torchspan.";
/// Whether a folder with this name may be that of a job.
bool is_job_name(const std::string& name);

/// The process id of the launcher that runs the job in `folder`, as in /proc; empty if none runs it, or the system does not
/// tell.
std::string launcher_of(const std::string& folder);

/// Asks all workers of a job on this host for their state, by rank; those that do not answer within `timeout`, or before
/// `stopping` becomes true, are marked. Throws Error{kInvalid} if there is no worker that can be asked.
std::vector<WorkerReport> ask_workers(Executor& executor, const std::string& folder, Duration timeout,
                                      const std::atomic<bool>* stopping = nullptr);

/// The path of the socket at which the launcher of a job on several hosts answers; `folder`: the job's.
std::string launcher_socket(const std::string& folder);

/// The workers of all hosts of a job, by rank.
struct JobState {
  std::vector<WorkerReport> workers;
  std::string note;  ///< why workers of other hosts are missing; empty: none are
};

/// Asks the workers of this host, and the launcher of this host for those of the other hosts. Throws Error{kInvalid} if
/// neither can be asked.
JobState ask_job(Executor& executor, const std::string& folder, Duration timeout);

}  // namespace torchspan::launch
