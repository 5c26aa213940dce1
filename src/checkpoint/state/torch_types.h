#pragma once
#include <cstddef>
#include <optional>
#include <span>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>

#include "checkpoint/files/manifest.h"
#include "checkpoint/files/safetensors.h"

namespace torchspan::checkpoint {

/// Nullopt for dtypes that the safetensors format lacks.
std::optional<ElementType> element_type_of(at::ScalarType type);
/// Nullopt for element types that this LibTorch lacks.
std::optional<at::ScalarType> scalar_type_of(ElementType type);

inline Sizes sizes_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }
/// A dense CPU tensor with these contents, over memory that `tensor` borrows.
at::Tensor borrow_tensor(const std::byte* data, at::IntArrayRef sizes, at::ScalarType type);
/// The bytes of a contiguous CPU tensor.
inline BytesView bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace torchspan::checkpoint
