#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/rpc/message.h>
#include <torchspan/rpc/options.h>

#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// Holds the device maps of one worker by peer name, and answers what wire::pack() and wire::unpack() ask.
/// Constant, hence thread-safe.
class Devices {
 public:
  using Place = std::function<c10::Device(c10::Device)>;

  Devices(WorkerInfo self, std::map<std::string, DeviceMap> maps)
      : self_(std::move(self)), maps_(std::move(maps)) {}

  /// Throws Error{kInvalid} if a map names a device that this process lacks.
  void check_here() const;
  /// Throws Error{kInvalid} if a map is for a worker that is not in this world.
  void check_names(const std::vector<WorkerInfo>& world) const;
  /// Returns the function from a device here to the device of an argument on `peer`; null without a map,
  /// where `peer` decides. Calls to this worker itself keep the device. The function throws Error{kInvalid}
  /// for a device without a place.
  Place arguments(std::uint32_t peer, const PeerTable& peers) const;
  /// Returns the same for results: from a device on `peer` to the device here.
  Place results(std::uint32_t peer, const PeerTable& peers) const;
  /// Returns the device on `peer` to which the map for it maps a device here; nullopt if it does not.
  std::optional<c10::Device> mapped(std::uint32_t peer, const PeerTable& peers, c10::Device here) const;

 private:
  using Lookup = std::optional<c10::Device> (DeviceMap::*)(c10::Device) const;
  /// Makes the error for a device of `peer` that has no place.
  using Refusal = Error (Devices::*)(const std::string& device, const std::string& peer) const;
  Place place(std::uint32_t peer, const PeerTable& peers, Lookup lookup, Refusal refusal) const;
  Error no_place_there(const std::string& device, const std::string& peer) const;
  Error no_place_here(const std::string& device, const std::string& peer) const;

  const WorkerInfo self_;
  const std::map<std::string, DeviceMap> maps_;
};

}  // namespace torchspan::rpc
