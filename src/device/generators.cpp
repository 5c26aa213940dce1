#include "device/api/generators.h"

#include <ATen/core/ivalue.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchspan::device {

std::vector<NamedGenerator> default_generators() {
  std::vector<NamedGenerator> all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return all;
  const c10::DeviceIndex count = c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    const c10::Device device(c10::kCUDA, index);
    all.push_back({device.str(), at::globalContext().defaultGenerator(device)});
  }
  return all;
}

}  // namespace torchspan::device
