#include "device/api/devices.h"

#include <fmt/format.h>
#include <mutex>

#include <ATen/core/ivalue.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "core/api/throw_invalid.h"

namespace torchspan::device {

DeviceCount count_devices(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return {};
  // In a process without CUDA devices, torch's fake tensors, which DTensor uses, install a guard that claims eight.
  if (type == c10::kCUDA && !at::globalContext().hasCUDA()) return {.supported = true};
  return {.supported = true, .count = c10::impl::getDeviceGuardImpl(type)->deviceCount()};
}

c10::Device parse(const std::string& text) {
  try {
    const c10::Device device(text);
    const std::size_t colon = text.find(':');
    const std::string number = colon == std::string::npos ? "-1" : text.substr(colon + 1);
    if (number == std::to_string(device.index())) return device;  // LibTorch keeps the last byte of a number
  } catch (const std::exception&) {
  }
  throw_invalid("'{}' is not a device that this LibTorch supports", text);
}

std::string why_absent(c10::Device device, DeviceCount here) {
  if (device.is_cpu()) return {};
  if (device.is_meta()) return "a meta tensor has no data";
  if (here.count > 0 && device.index() >= -1 && device.index() < here.count) return {};
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

std::vector<NamedGenerator> default_generators() {
  std::vector<NamedGenerator> all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  const int count = count_devices(c10::kCUDA).count;
  for (int index = 0; index < count; ++index) {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
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
