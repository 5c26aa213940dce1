#pragma once
#include <cstddef>
#include <cstdint>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

namespace torchspan::device {

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

}  // namespace torchspan::device
