#pragma once
#include <string>
#include <string_view>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::launch {

/// The variable that marks the processes of a job. A job inside a job appends its id: "outer:inner".
inline constexpr const char* kJobsVariable = "TORCHSPAN_JOBS";

/// Whether the environment block of a process ("NAME=VALUE", each ended by a zero byte) marks it as one of
/// `job`.
bool is_marked(std::string_view environment_block, std::string_view job);

/// Returns the processes of this user that `job` marks, wherever they are in the tree of processes, except
/// this one. Empty without /proc.
std::vector<pid_t> processes_of(std::string_view job);

/// Kills the processes of `job` until none is left, for at most two seconds. Returns how many are left.
std::size_t kill_processes_of(Executor& executor, std::string_view job);

/// Calls kill_processes_of() when it is destroyed.
class ProcessCleanup {
 public:
  ProcessCleanup(Executor& executor, std::string job) : executor_(executor), job_(std::move(job)) {}
  ~ProcessCleanup();
  ProcessCleanup(const ProcessCleanup&) = delete;
  ProcessCleanup& operator=(const ProcessCleanup&) = delete;

 private:
  Executor& executor_;
  const std::string job_;
};

}  // namespace torchspan::launch
