#include "device/api/memory_view.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>

namespace torchspan::device {

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
