#pragma once
// The devices of tests that can run on real ones: stand-ins (stand_in_device.h) or, with TORCHSPAN_TEST_DEVICE=cuda,
// CUDA devices, which report no races.
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "device/api/device_runtime.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::testing {

inline bool on_cuda() {
  const char* device = std::getenv("TORCHSPAN_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

inline int test_device_count() {
  const c10::DeviceType type = on_cuda() ? c10::kCUDA : c10::DeviceType::PrivateUse1;
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
}

inline c10::Device test_device(int index) {
  if (index >= test_device_count())
    throw std::runtime_error("the test needs device " + std::to_string(index) + ", and there are " +
                             std::to_string(test_device_count()));
  return on_cuda() ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)) : stand_in(index);
}

/// The runtime of these devices.
inline std::shared_ptr<const device::DeviceRuntime> test_runtime() {
  if (!on_cuda()) return std::make_shared<StandInRuntime>();
  auto runtime = device::cuda_device_runtime();
  if (!runtime) throw std::runtime_error("TORCHSPAN_TEST_DEVICE is cuda: configure with TORCHSPAN_CUDA=ON");
  return runtime;
}

}  // namespace torchspan::testing
