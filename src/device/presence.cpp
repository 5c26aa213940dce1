#include "device/api/presence.h"

#include <fmt/format.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchspan::device {

DeviceCount count_devices(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return {};
  return {.supported = true, .count = c10::impl::getDeviceGuardImpl(type)->deviceCount()};
}

std::string why_absent(c10::Device device, DeviceCount here) {
  if (device.is_cpu()) return {};
  if (device.is_meta()) return "a meta tensor has no data";
  if (here.count > 0 && device.index() < here.count) return {};
  const std::string devices =
      c10::DeviceTypeName(device.type(), /*lower_case=*/true) + (here.count == 1 ? " device" : " devices");
  if (here.count > 0) {
    return fmt::format(
        "this process has {} {}: choose a smaller index, such as the local rank, or change "
        "CUDA_VISIBLE_DEVICES",
        here.count, devices);
  }
  if (!device.is_cuda()) return fmt::format("this process has no {}", devices);
  return fmt::format(
      "this process has no {}{}", devices,
      here.supported
          ? ": check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
          : ", because it is linked with LibTorch's CPU half: use a LibTorch for CUDA and configure "
            "with TORCHSPAN_CUDA=ON");
}

std::string why_absent(c10::Device device) { return why_absent(device, count_devices(device.type())); }

}  // namespace torchspan::device
