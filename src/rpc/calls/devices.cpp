#include "rpc/calls/devices.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/api/throw_invalid.h"
#include "device/api/devices.h"
#include "wire/api/tensors.h"

namespace torchspan {

DeviceMap::DeviceMap(std::vector<Pair> pairs) : pairs_(std::move(pairs)) {
  for (auto pair = pairs_.begin(); pair != pairs_.end(); ++pair) {
    for (const c10::Device& device : {pair->first, pair->second}) {
      if (device.is_cpu() || device.has_index()) continue;
      throw_invalid("a device map names '{}' without an index; say which one: '{}:0'", device.str(),
                    device.str());
    }
    const auto twice = std::find_if(pairs_.begin(), pair, [&](const Pair& before) {
      return before.first == pair->first || before.second == pair->second;
    });
    if (twice == pair) continue;
    throw_invalid("a device map is one to one, but has both {} to {} and {} to {}", twice->first.str(),
                  twice->second.str(), pair->first.str(), pair->second.str());
  }
}

std::optional<c10::Device> DeviceMap::there(c10::Device here) const {
  for (const Pair& pair : pairs_) {
    if (pair.first == here) return pair.second;
  }
  return std::nullopt;
}

std::optional<c10::Device> DeviceMap::here(c10::Device there) const {
  for (const Pair& pair : pairs_) {
    if (pair.second == there) return pair.first;
  }
  return std::nullopt;
}

namespace rpc {

void Devices::check_here() const {
  for (const auto& [peer, map] : maps_) {
    for (const DeviceMap::Pair& pair : map.pairs()) {
      const std::string why = device::why_absent(pair.first);
      if (why.empty()) continue;
      throw_invalid("worker '{}' (rank {}) has a device map for worker '{}' that names its own {}, but {}",
                    self_.name, self_.rank, peer, pair.first.str(), why);
    }
  }
}

void Devices::check_names(const std::vector<WorkerInfo>& world) const {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : world) names.push_back(worker.name);
  for (const auto& [peer, map] : maps_) {
    if (std::find(names.begin(), names.end(), peer) != names.end()) continue;
    throw_invalid("worker '{}' has a device map for worker '{}', which is not in this world; there are {}",
                  self_.name, peer, fmt::join(names, ", "));
  }
}

Devices::Place Devices::arguments(std::uint32_t peer, const PeerTable& peers) const {
  return place(peer, peers, &DeviceMap::there, &Devices::no_place_there);
}

Devices::Place Devices::results(std::uint32_t peer, const PeerTable& peers) const {
  return place(peer, peers, &DeviceMap::here, &Devices::no_place_here);
}

std::optional<c10::Device> Devices::mapped(std::uint32_t peer, const PeerTable& peers,
                                           c10::Device here) const {
  if (maps_.empty()) return std::nullopt;
  const auto found = maps_.find(peers.name(peer));
  return found == maps_.end() ? std::nullopt : found->second.there(here);
}

Devices::Place Devices::place(std::uint32_t peer, const PeerTable& peers, Lookup lookup,
                              Refusal refusal) const {
  if (peer == self_.rank) return [](c10::Device device) { return device; };
  if (maps_.empty()) return nullptr;
  const std::string name = peers.name(peer);
  const auto found = maps_.find(name);
  if (found == maps_.end()) return nullptr;
  return [this, map = &found->second, name, lookup, refusal](c10::Device device) {
    if (const auto other = (map->*lookup)(device)) return *other;
    if (device.is_cpu()) return device;
    throw(this->*refusal)(device.str(), name);
  };
}

Error Devices::no_place_there(const std::string& device, const std::string& peer) const {
  return Error(ErrorKind::kInvalid,
               fmt::format("it is on {}, which the device map of worker '{}' for worker '{}' does not "
                           "contain; add an entry for it, or send tensor.cpu()",
                           device, self_.name, peer));
}

Error Devices::no_place_here(const std::string& device, const std::string& peer) const {
  return Error(ErrorKind::kInvalid,
               fmt::format("a result is on {} of worker '{}', to which the device map of worker '{}' maps "
                           "no device; add an entry for it, or return tensor.cpu()",
                           device, peer, self_.name));
}

}  // namespace rpc
}  // namespace torchspan
