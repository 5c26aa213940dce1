#pragma once
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

namespace torchspan {

/// Where tensors of a worker live on one of its peers: pairs of a device here and the device there, one to
/// one. Calls to the peer go by it, and their results come back by its inverse. The CPU may be named as well;
/// if it is not, what lives on the CPU stays there.
class DeviceMap {
 public:
  using Pair = std::pair<c10::Device, c10::Device>;

  DeviceMap() = default;
  /// {{here, there}, …}. Throws Error{kInvalid} when a device comes twice on one side, or has no index
  /// ("cuda" for "cuda:0").
  DeviceMap(std::initializer_list<Pair> pairs) : DeviceMap(std::vector<Pair>(pairs)) {}
  explicit DeviceMap(std::vector<Pair> pairs);

  /// Nothing for devices that it does not name.
  std::optional<c10::Device> there(c10::Device here) const;
  std::optional<c10::Device> here(c10::Device there) const;
  const std::vector<Pair>& pairs() const { return pairs_; }

 private:
  std::vector<Pair> pairs_;
};

}  // namespace torchspan
