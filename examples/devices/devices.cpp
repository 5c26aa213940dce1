#include "devices/devices.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <torch/cuda.h>

#include <torchspan/core/error.h>

namespace devices {
namespace {

[[noreturn]] void reject(const std::string& option, const std::string& why) {
  throw torchspan::Error(torchspan::ErrorKind::kInvalid, fmt::format("--device {}: {}", option, why));
}

c10::Device parse(const std::string& option) {
  try {
    const c10::Device device(option);
    if (device.is_cpu() || device.is_cuda()) return device;
  } catch (const c10::Error&) {
  }
  reject(option, "give cpu, cuda or cuda:N");
}

}  // namespace

void add_option(CLI::App& app, std::string& device) {
  app.add_option("--device", device, "cpu, cuda (the host's GPUs in turn) or cuda:N")->capture_default_str();
}

c10::Device of_rank(const std::string& option, int local_rank) {
  const c10::Device device = parse(option);
  if (device.is_cpu()) return device;
  if (!torch::cuda::is_available()) {
    reject(
        option,
        "LibTorch finds no GPU: it is built without CUDA, or the driver is missing; use --device cpu or see "
        "docs/libtorch.md");
  }
  const int count = static_cast<int>(torch::cuda::device_count());
  const int index = device.has_index() ? device.index() : local_rank % count;
  if (index >= count) reject(option, fmt::format("this host has {} GPU{}", count, count == 1 ? "" : "s"));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

std::map<std::string, torchspan::DeviceMap> maps(
    const std::string& option, const torchspan::rendezvous::WorkerEnvironment& environment) {
  std::map<std::string, torchspan::DeviceMap> maps;
  const c10::Device here = of_rank(option, environment.local_rank);
  if (here.is_cpu()) return maps;
  for (int rank = 0; rank < environment.world_size; ++rank) {
    if (rank == environment.rank) continue;
    maps.emplace(fmt::format("worker{}", rank), torchspan::DeviceMap{{here, of_rank(option, rank)}});
  }
  return maps;
}

}  // namespace devices
