#pragma once
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Generator.h>

namespace torchspan::device {

/// A default generator of random numbers, and its device as text: "cpu", "cuda:0".
struct NamedGenerator {
  std::string device;
  at::Generator generator;
};

/// LibTorch's default generators: of the CPU and, if this process has CUDA devices, of each of them.
std::vector<NamedGenerator> default_generators();

}  // namespace torchspan::device
