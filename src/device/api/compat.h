#pragma once
// All differences between the supported LibTorch versions (1.13 to 2.x) that concern devices.
#include <ATen/core/ivalue.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>

#include "device/api/torch_version.h"

namespace torchspan::device::compat {

/// The implementation of a sparse COO tensor, with its indices and values. Some versions lack the header with
/// LibTorch's accessor.
inline const at::SparseTensorImpl& sparse_impl(const at::Tensor& tensor) {
  return *static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

/// The same for CSR, CSC, BSR and BSC.
inline const at::SparseCsrTensorImpl& compressed_impl(const at::Tensor& tensor) {
  return *static_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

}  // namespace torchspan::device::compat
