#include "python/rpc/device_maps.h"

#include <fmt/format.h>

#include <ATen/ATen.h>

namespace torchspan::python {

const TorchDeviceMap& DeviceMaps::to(const std::string& worker) const {
  const auto found = maps_.find(worker);
  return found == maps_.end() ? none_ : found->second;
}

std::vector<c10::Device> DeviceMaps::of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  bool any = false;
  for (const at::Tensor& tensor : tensors) {
    devices.push_back(tensor.device());
    any |= !tensor.device().is_cpu();
  }
  if (!any) devices.clear();
  return devices;
}

std::vector<c10::Device> DeviceMaps::arguments(const std::vector<at::Tensor>& tensors,
                                               const std::string& worker, const TorchDeviceMap& given) const {
  const TorchDeviceMap& map = given.empty() ? to(worker) : given;
  std::vector<c10::Device> devices;
  if (map.empty()) {
    devices = of(tensors);
    if (devices.empty() || worker == self_) return devices;
  }
  devices.clear();
  for (const at::Tensor& tensor : tensors) {
    const auto place = map.find(tensor.device());
    TORCH_CHECK(
        place != map.end() || tensor.device().is_cpu(),
        fmt::format("torchspan: worker {} sends a tensor on {} to worker {}, and has no device map for it: "
                    "add it with set_device_map() of the options, on all workers, or send tensor.cpu()",
                    self_, tensor.device().str(), worker));
    devices.push_back(place != map.end() ? place->second : tensor.device());
  }
  return devices;
}

std::vector<c10::Device> DeviceMaps::results(const std::vector<c10::Device>& there, const std::string& worker,
                                             const TorchDeviceMap& given) const {
  if (worker == self_) return there;
  const TorchDeviceMap& map = given.empty() ? to(worker) : given;
  std::vector<c10::Device> devices;
  for (const c10::Device& device : there) {
    c10::Device here = c10::kCPU;
    bool found = device.is_cpu();
    for (const auto& [from, to] : map) {
      if (to != device) continue;
      here = from;
      found = true;
    }
    TORCH_CHECK(
        found,
        fmt::format("torchspan: worker {} returns a tensor on {}, to which the device map of worker {} "
                    "maps no device: add it with set_device_map() of the options, or return "
                    "tensor.cpu()",
                    worker, device.str(), self_));
    devices.push_back(here);
  }
  return devices;
}

void DeviceMaps::place(std::vector<at::Tensor>& tensors, const std::vector<c10::Device>& devices) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (tensors[i].device() == devices[i]) continue;
    const bool requires_grad = tensors[i].requires_grad();
    tensors[i] = tensors[i].detach().to(devices[i]).set_requires_grad(requires_grad);
  }
}

}  // namespace torchspan::python
