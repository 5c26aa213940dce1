#include "launch/supervisor/limits.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "core/api/system_files.h"

namespace torchspan::launch {
namespace {

/// quota / period, two numbers in microseconds; nullopt if they are absent or the quota is "max" or -1.
std::optional<int> cores_of(const std::string& numbers) {
  std::istringstream words(numbers);
  double quota = 0, period = 0;
  if (!(words >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return static_cast<int>(std::clamp(std::ceil(quota / period), 1., 1e6));
}

/// A group and those that contain it: "/a/b", "/a" and "".
std::vector<std::string> with_parents(std::string group) {
  std::vector<std::string> groups;
  for (; !group.empty(); group.resize(group.rfind('/'))) {
    if (group.front() != '/') break;
    if (group != "/") groups.push_back(group);
  }
  groups.emplace_back();
  return groups;
}

bool has_cpu(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

}  // namespace

std::optional<int> read_cpu_quota(const std::string& root, const std::string& groups) {
  std::optional<int> least;
  const auto limit = [&](const std::string& numbers) {
    const auto cores = cores_of(numbers);
    if (cores) least = std::min(*cores, least.value_or(*cores));
  };
  std::ifstream file(groups);
  for (std::string line;
       std::getline(file, line);) {  // "0::/group", or with version 1 "4:cpu,cpuacct:/group"
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    for (const std::string& group : with_parents(line.substr(second + 1))) {
      if (controllers.empty()) limit(read_system_line(root + group + "/cpu.max"));
      if (!has_cpu(controllers)) continue;
      const std::string folder = root + "/cpu" + group;  // also a link to cpu,cpuacct
      limit(read_system_line(folder + "/cpu.cfs_quota_us") + " " +
            read_system_line(folder + "/cpu.cfs_period_us"));
    }
  }
  return least;
}

RaisedOpenFiles::RaisedOpenFiles() {
  if (getrlimit(RLIMIT_NOFILE, &before_) != 0 || before_.rlim_cur == before_.rlim_max) return;
  const rlimit most{before_.rlim_max, before_.rlim_max};
  raised_ = setrlimit(RLIMIT_NOFILE, &most) == 0;
}

RaisedOpenFiles::~RaisedOpenFiles() {
  if (raised_) setrlimit(RLIMIT_NOFILE, &before_);
}

}  // namespace torchspan::launch
