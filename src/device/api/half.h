#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::device {

/// Whether values have 16 bits: float16 or bfloat16. Sums and norms of them are computed in float.
inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

/// The tensor itself, or its values in float if they have 16 bits.
inline at::Tensor widened(const at::Tensor& tensor) {
  return is_half(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

}  // namespace torchspan::device
