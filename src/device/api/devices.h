#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace torchspan::device {

/// The devices of one type in this process.
struct DeviceCount {
  bool supported = false;  ///< whether this program's LibTorch supports the type
  int count = 0;
};
DeviceCount count_devices(c10::DeviceType type);

/// The device of a text such as "cuda:1". Throws Error{kInvalid} if LibTorch has none of this name or number.
c10::Device parse(const std::string& text);

/// Why a process with these devices cannot use `device`, and what to do; empty if it can.
std::string why_absent(c10::Device device, DeviceCount here);
/// The same for this process.
std::string why_absent(c10::Device device);

/// A default generator of random numbers, and its device as text: "cpu", "cuda:0".
struct NamedGenerator {
  std::string device;
  at::Generator generator;
};

/// LibTorch's default generators: of the CPU and, if this process has CUDA devices, of each of them.
std::vector<NamedGenerator> default_generators();

/// What LibTorch wants to be done under the generator's lock.
at::Tensor state_of(at::Generator generator);
void set_state(at::Generator generator, const at::Tensor& state);
std::uint64_t seed_of(at::Generator generator);
void set_seed(at::Generator generator, std::uint64_t seed);

}  // namespace torchspan::device
