#pragma once
#include <cstddef>
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace torchspan::device {

/// Strides as at::empty_like() has them: of the tensor if it has no gaps and overlaps, else row-major.
at::DimVector dense_strides_like(const at::Tensor& tensor);

/// Memory on a device as a tensor, which holds `owner` and does not free the memory itself.
at::Tensor view_memory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device, std::shared_ptr<void> owner = nullptr);

}  // namespace torchspan::device
