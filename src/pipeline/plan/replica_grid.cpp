#include "pipeline/plan/replica_grid.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>

#include <torchspan/core/error.h>

namespace torchspan::pipeline {
namespace {

/// For each stage, the first stage that has the same owner.
std::vector<std::size_t> pattern_of(const std::vector<std::string>& owners) {
  std::vector<std::size_t> pattern;
  for (const std::string& owner : owners)
    pattern.push_back(
        static_cast<std::size_t>(std::find(owners.begin(), owners.end(), owner) - owners.begin()));
  return pattern;
}

[[noreturn]] void refuse_replicas(const std::string& why) {
  throw Error(ErrorKind::kInvalid, "PipelineOptions::" + why);
}

}  // namespace

std::vector<std::string> ReplicaGrid::all_names() const {
  std::vector<std::string> all;
  for (const auto& replica : names) all.insert(all.end(), replica.begin(), replica.end());
  return all;
}

std::vector<std::uint32_t> ReplicaGrid::all_ranks() const {
  std::vector<std::uint32_t> all;
  for (const auto& replica : ranks) all.insert(all.end(), replica.begin(), replica.end());
  return all;
}

std::vector<std::string> ReplicaGrid::names_of(int worker) const {
  std::vector<std::string> all;
  for (const auto& replica : names) all.push_back(replica[static_cast<std::size_t>(worker)]);
  return all;
}

std::vector<std::string> distinct(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const std::string& name : names) {
    if (std::find(all.begin(), all.end(), name) == all.end()) all.push_back(name);
  }
  return all;
}

std::vector<std::vector<std::string>> owners_by_replica(const std::vector<std::string>& workers, int replicas,
                                                        std::size_t stages) {
  if (replicas == 1) return {workers};
  if (replicas < 1) refuse_replicas(fmt::format("replicas is {}; it must be 1 or more", replicas));
  const auto count = static_cast<std::size_t>(replicas);
  if (workers.size() != count * stages) {
    refuse_replicas(
        fmt::format("replicas is {}, with {} stages each: that takes the owners of {} stages, but "
                    "there are {}. Set `workers` to the owners of all stages of replica 0, then of "
                    "replica 1 and so on, or start a multiple of {} workers",
                    replicas, stages, count * stages, workers.size(), replicas));
  }
  std::vector<std::vector<std::string>> split;
  std::map<std::string, std::size_t> replica_of;
  for (std::size_t replica = 0; replica < count; ++replica) {
    const auto begin = workers.begin() + static_cast<std::ptrdiff_t>(replica * stages);
    split.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(stages));
    for (const std::string& owner : split.back()) {
      const auto [known, fresh] = replica_of.emplace(owner, replica);
      if (known->second == replica) continue;
      refuse_replicas(
          fmt::format("workers: '{}' owns a stage of replica {} and one of replica {}; a "
                      "worker belongs to one replica",
                      owner, known->second, replica));
    }
    const std::vector<std::size_t> wanted = pattern_of(split.front()), here = pattern_of(split.back());
    const auto apart = std::mismatch(wanted.begin(), wanted.end(), here.begin()).first - wanted.begin();
    if (wanted == here) continue;
    refuse_replicas(fmt::format(
        "workers: replica {} places stage {} on '{}', which does not match replica 0; stages that "
        "share a worker in one replica must do so in all",
        replica, apart, split.back()[static_cast<std::size_t>(apart)]));
  }
  return split;
}

}  // namespace torchspan::pipeline
