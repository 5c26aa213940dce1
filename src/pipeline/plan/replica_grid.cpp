#include "pipeline/plan/replica_grid.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <optional>
#include <string_view>
#include <utility>

#include <torchspan/core/error.h>

#include "device/api/devices.h"

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

[[noreturn]] void refuse_replicas(const std::string& why) { throw_invalid("PipelineOptions::" + why); }

constexpr const char* kMiddle = "\t0\t";

/// Reads the lines "-1 - range, 0, device, nothing" with tabs between. Nullopt for another line.
std::optional<std::pair<int, c10::Device>> parse_line(std::string_view line) {
  int number = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
  line.remove_prefix(static_cast<std::size_t>(end - line.data()));
  if (error != std::errc() || number >= 0 || !line.starts_with(kMiddle) || !line.ends_with('\t'))
    return std::nullopt;
  line.remove_prefix(std::string_view(kMiddle).size());
  line.remove_suffix(line.empty() ? 0 : 1);
  try {
    return std::pair(-(number + 1), device::parse(std::string(line)));
  } catch (const std::exception&) {  // a device that this release does not know
    return std::nullopt;
  }
}

}  // namespace

std::string StageDevices::line(int range, c10::Device device) {
  return fmt::format("{}{}{}\t\n", -1 - range, kMiddle, device.str());
}

void StageDevices::read(std::uint32_t rank, const std::string& report) {
  for (std::size_t begin = 0, end = 0; begin < report.size(); begin = end + 1) {
    end = std::min(report.find('\n', begin), report.size());
    if (const auto line = parse_line(std::string_view(report).substr(begin, end - begin)))
      devices_[rank].insert_or_assign(line->first, line->second);
  }
}

rpc::DevicePlace StageDevices::of_range(std::uint32_t rank, int range) const {
  const auto worker = devices_.find(rank);
  if (worker == devices_.end()) return {};
  const auto found = worker->second.find(range);
  if (found == worker->second.end()) return {};
  return {rpc::DevicePlace::By::kDevice, found->second};
}

rpc::DevicePlace StageDevices::of_worker(std::uint32_t rank) const {
  const auto worker = devices_.find(rank);
  if (worker == devices_.end() || worker->second.empty()) return {};
  const c10::Device device = worker->second.begin()->second;
  for (const auto& [range, other] : worker->second) {
    if (other != device) return {};
  }
  return {rpc::DevicePlace::By::kDevice, device};
}

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
