#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

namespace torchspan::python {

using TorchDeviceMap = torch::distributed::rpc::DeviceMap;

/// Where the tensors of calls to other workers, and of their results, are placed. Tensors travel through the hosts'
/// memory. Immutable.
class DeviceMaps {
 public:
  DeviceMaps(std::string self, std::unordered_map<std::string, TorchDeviceMap> maps)
      : self_(std::move(self)), maps_(std::move(maps)) {}

  const TorchDeviceMap& to(const std::string& worker) const;
  /// The devices of a call's tensors on `worker`; empty if all are on CPUs. `map`: instead of the map for the worker, if
  /// it is not empty. Throws c10::Error for a tensor on a device without a place there.
  std::vector<c10::Device> arguments(const std::vector<at::Tensor>& tensors, const std::string& worker,
                                     const TorchDeviceMap& map) const;
  /// The devices here of a result whose tensors are on `there`.
  std::vector<c10::Device> results(const std::vector<c10::Device>& there, const std::string& worker,
                                   const TorchDeviceMap& map) const;

  /// The devices of tensors; empty if all are on CPUs.
  static std::vector<c10::Device> of(const std::vector<at::Tensor>& tensors);
  /// Moves received tensors to `devices`; none for an empty list.
  static void place(std::vector<at::Tensor>& tensors, const std::vector<c10::Device>& devices);

 private:
  const std::string self_;
  const std::unordered_map<std::string, TorchDeviceMap> maps_;
  const TorchDeviceMap none_;
};

}  // namespace torchspan::python
