#pragma once
// All differences between the supported LibTorch versions that concern the wire format.
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "device/api/torch_version.h"

namespace torchspan::wire::compat {

inline const void* const_data(const at::Tensor& tensor) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 0)
  return tensor.const_data_ptr();
#else
  return tensor.data_ptr();
#endif
}

/// Whether dimensions have names, which LibTorch 2.13 removed.
inline bool has_names(const at::Tensor& tensor) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
  return false;
#else
  return tensor.has_names();
#endif
}

}  // namespace torchspan::wire::compat
