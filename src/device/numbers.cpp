#include "device/api/numbers.h"

#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>

#include <torchspan/detail/device/streams.h>

namespace torchspan::device {

std::vector<double> read_numbers(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<double> numbers(tensors.size());
  std::unordered_map<c10::Device, std::vector<std::size_t>> on_devices;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (has_streams(tensors[i].device())) {
      on_devices[tensors[i].device()].push_back(i);
    } else {
      numbers[i] = tensors[i].item<double>();
    }
  }
  // Those of a device type are collected on one device, so that the host waits once.
  struct Collected {
    std::vector<at::Tensor> tensors;
    std::vector<std::size_t> places;
  };
  std::map<c10::DeviceType, Collected> of_types;
  for (const auto& [device, places] : on_devices) {
    std::vector<at::Tensor> together;
    for (const std::size_t i : places) together.push_back(tensors[i].reshape({1}));
    at::Tensor values = at::cat(together);
    auto& [collected, all_places] = of_types[device.type()];
    if (!collected.empty())
      values = values.to(values.options().device(collected.front().device()), /*non_blocking=*/true);
    collected.push_back(std::move(values));
    all_places.insert(all_places.end(), places.begin(), places.end());
  }
  for (const auto& [type, all] : of_types) {
    const at::Tensor values = at::cat(all.tensors).cpu().to(at::kDouble);
    for (std::size_t k = 0; k < all.places.size(); ++k) numbers[all.places[k]] = values.data_ptr<double>()[k];
  }
  return numbers;
}

}  // namespace torchspan::device
