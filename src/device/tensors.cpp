#include "device/api/tensors.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
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

at::DimVector dense_strides_like(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return at::DimVector(tensor.strides());
  at::DimVector strides(tensor.sizes().size());
  std::int64_t next = 1;
  for (std::size_t i = strides.size(); i-- > 0;) {
    strides[i] = next;
    next *= std::max<std::int64_t>(tensor.sizes()[i], 1);
  }
  return strides;
}

at::Tensor view_memory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device, std::shared_ptr<void> owner) {
  return at::for_blob(data, sizes)
      .strides(strides)
      .deleter([owner = std::move(owner)](void*) {})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace torchspan::device
