#include "device/api/numbers.h"

#include <cstddef>
#include <unordered_map>

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
  for (const auto& [device, places] : on_devices) {
    std::vector<at::Tensor> together;
    for (const std::size_t i : places) together.push_back(tensors[i].reshape({1}));
    const at::Tensor values = at::cat(together).cpu().to(at::kDouble);
    for (std::size_t k = 0; k < places.size(); ++k) numbers[places[k]] = values.data_ptr<double>()[k];
  }
  return numbers;
}

}  // namespace torchspan::device
