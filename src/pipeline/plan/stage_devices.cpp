#include "pipeline/plan/stage_devices.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <optional>
#include <string_view>
#include <utility>

namespace torchspan::pipeline {
namespace {

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
    return std::pair(-(number + 1), c10::Device(std::string(line)));
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

}  // namespace torchspan::pipeline
