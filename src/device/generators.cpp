#include "device/api/generators.h"

#include <mutex>

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

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

std::uint64_t seed_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.current_seed();
}

void set_seed(at::Generator generator, std::uint64_t seed) {
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace torchspan::device
