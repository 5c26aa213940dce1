#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <sys/resource.h>

namespace torchspan::launch {

/// Returns how many processors the control groups of this process (versions 1 and 2) let it use, as the CPU limit of a
/// container does, rounded up; nullopt if they do not limit it. `root`: where control groups are mounted; `groups`: the file
/// that lists those of this process.
std::optional<int> read_cpu_quota(const std::string& root = "/sys/fs/cgroup",
                                  const std::string& groups = "/proc/self/cgroup");

/// Raises this process's limit of open files as far as it may, because the launcher has up to six for each worker. The
/// destructor restores it. Leaves the limit as it is if the system refuses.
class RaisedOpenFiles {
 public:
  RaisedOpenFiles();
  ~RaisedOpenFiles();
  RaisedOpenFiles(const RaisedOpenFiles&) = delete;

  /// The soft limit before it was raised; 0 if it was not raised.
  std::uint64_t before() const { return raised_ ? std::uint64_t{before_.rlim_cur} : 0; }

 private:
  rlimit before_{};
  bool raised_ = false;
};

}  // namespace torchspan::launch
