#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/rpc/message.h>
#include <torchspan/rpc/device_map.h>

#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// The device maps of one worker, by the names of its peers, as what wire::pack() and wire::unpack() ask.
/// Constant, hence thread-safe.
class Devices {
 public:
  using Place = std::function<c10::Device(c10::Device)>;

  Devices(WorkerInfo self, std::map<std::string, DeviceMap> maps)
      : self_(std::move(self)), maps_(std::move(maps)) {}

  /// Throws Error{kInvalid} when a map names a device that this process lacks.
  void check_here() const;
  /// Throws Error{kInvalid} when a map is for nobody of this world.
  void check_names(const std::vector<WorkerInfo>& world) const;
  /// Where arguments live on `peer`, or null where that is up to it: without a map. On this worker itself
  /// they live where they are. The function throws Error{kInvalid} for a device without a place.
  Place arguments(std::uint32_t peer, const PeerTable& peers) const;
  /// Where the results of calls to `peer` live here, likewise.
  Place results(std::uint32_t peer, const PeerTable& peers) const;

 private:
  using Lookup = std::optional<c10::Device> (DeviceMap::*)(c10::Device) const;
  /// The error for a device without a place, of `peer`.
  using Refusal = Error (Devices::*)(const std::string& device, const std::string& peer) const;
  Place place(std::uint32_t peer, const PeerTable& peers, Lookup lookup, Refusal refusal) const;
  Error no_place_there(const std::string& device, const std::string& peer) const;
  Error no_place_here(const std::string& device, const std::string& peer) const;

  const WorkerInfo self_;
  const std::map<std::string, DeviceMap> maps_;
};

}  // namespace torchspan::rpc
