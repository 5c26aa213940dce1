#pragma once
#include <string>

#include <c10/core/Device.h>

namespace torchspan::device {

/// The devices of one type in this process.
struct DeviceCount {
  bool supported = false;  ///< whether this program's LibTorch supports the type
  int count = 0;
};
DeviceCount count_devices(c10::DeviceType type);

/// Why a process with these devices cannot use `device`, and what to do; empty if it can.
std::string why_absent(c10::Device device, DeviceCount here);
/// The same for this process.
std::string why_absent(c10::Device device);

}  // namespace torchspan::device
