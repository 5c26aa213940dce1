#pragma once
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

namespace torchspan {

/// Maps devices of this worker one-to-one to devices of one peer. Tensors in calls to the peer are placed
/// by the map, and tensors in their results by its inverse. CPU tensors stay on the CPU unless the map
/// names it.
class DeviceMap {
 public:
  using Pair = std::pair<c10::Device, c10::Device>;

  DeviceMap() = default;
  /// Builds the map from {{here, there}, …}. Throws Error{kInvalid} for a device that occurs twice on one
  /// side or has no index ("cuda" instead of "cuda:0").
  DeviceMap(std::initializer_list<Pair> pairs) : DeviceMap(std::vector<Pair>(pairs)) {}
  explicit DeviceMap(std::vector<Pair> pairs);

  /// Returns nullopt for a device that the map does not name.
  std::optional<c10::Device> there(c10::Device here) const;
  std::optional<c10::Device> here(c10::Device there) const;
  const std::vector<Pair>& pairs() const { return pairs_; }

 private:
  std::vector<Pair> pairs_;
};

}  // namespace torchspan
