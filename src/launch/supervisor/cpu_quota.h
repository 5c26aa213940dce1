#pragma once
#include <optional>
#include <string>

namespace torchspan::launch {

/// Returns how many processors the control groups of this process (versions 1 and 2) let it use, as the CPU limit of a
/// container does, rounded up; nullopt if they do not limit it. `root`: where control groups are mounted; `groups`: the file
/// that lists those of this process.
std::optional<int> read_cpu_quota(const std::string& root = "/sys/fs/cgroup",
                                  const std::string& groups = "/proc/self/cgroup");

}  // namespace torchspan::launch
