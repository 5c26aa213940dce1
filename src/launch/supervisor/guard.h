#pragma once
#include <string>
#include <sys/types.h>

#include "core/api/descriptor.h"

namespace torchspan::launch {

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
