#pragma once
#include <string>
#include <string_view>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "core/api/descriptor.h"

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

/// A process that kills what a launcher started if the launcher itself is killed: the workers' groups, and
/// every process that kJobsVariable marks. It has its own process group, blocks signals and holds none of the
/// launcher's descriptors. The destructor ends it. If it cannot be started, workers still die with the
/// launcher, but not the processes that they started.
class Guard {
 public:
  explicit Guard(const std::string& job);
  ~Guard();
  Guard(const Guard&) = delete;

  /// Takes groups: their id when they start, the negative id when they have ended. -1 if there is no guard.
  int registrations() const { return registrations_.get(); }
  pid_t pid() const { return pid_; }

 private:
  Descriptor registrations_;
  pid_t pid_ = -1;
};

/// Writes to Guard::registrations(); async-signal-safe.
void register_group(int registrations, pid_t group);

}  // namespace torchspan::launch
