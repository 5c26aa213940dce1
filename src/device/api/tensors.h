#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

namespace torchspan::device {

/// Whether values have 16 bits: float16 or bfloat16. Sums and norms of them are computed in float.
inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

/// The tensor itself, or its values in float if they have 16 bits.
inline at::Tensor widened(const at::Tensor& tensor) {
  return is_half(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

/// Reads floating-point tensors of one element each, after the work of this thread's current streams so far. Waits
/// once, however many tensors and devices there are: other devices copy theirs to one of them.
std::vector<double> read_numbers(const std::vector<at::Tensor>& tensors);

/// The memory of a dense tensor with all of its storage as a tensor of bytes, which shares it.
inline at::Tensor bytes_of_dense(const at::Tensor& tensor) {
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set(), c10::scalarTypeToTypeMeta(at::kByte));
  const std::int64_t count = static_cast<std::int64_t>(tensor.nbytes()), one = 1;
  bytes.unsafeGetTensorImpl()->set_sizes_and_strides({&count, 1}, {&one, 1});
  return bytes;
}

/// The bytes of such a tensor from `from` on.
inline at::Tensor bytes_of_dense(const at::Tensor& tensor, std::size_t from, std::size_t count) {
  return bytes_of_dense(tensor).narrow(0, static_cast<std::int64_t>(from), static_cast<std::int64_t>(count));
}

/// Strides as at::empty_like() has them: of the tensor if it has no gaps and overlaps, else row-major.
at::DimVector dense_strides_like(const at::Tensor& tensor);

/// Memory on a device as a tensor, which holds `owner` and does not free the memory itself.
at::Tensor view_memory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device, std::shared_ptr<void> owner = nullptr);

}  // namespace torchspan::device
