#pragma once
// All differences between the supported LibTorch versions (1.13 to 2.x) that concern devices.
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/api/torch_version.h"
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 2)
#include <ATen/ops/_foreach_copy.h>
#endif

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

/// Copies each of `from` into the tensor of `to` with the same index, which has its shape, dtype and device; all have one
/// dtype. Newer versions do so with one operation of a device, for these dtypes.
inline void copy_all(std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (to.empty()) return;
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 2)
  switch (to[0].scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
      return at::_foreach_copy_(to, from, /*non_blocking=*/true);
    default:
      break;
  }
#endif
  for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
}

/// Waits on the host until the device has reached what `event` recorded. In older versions, which cannot wait for an
/// event, a stream of LibTorch's pool waits for it, and the host for that stream.
inline void synchronize(const c10::Event& event) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 6)
  event.synchronize();
#else
  const c10::Stream waiting =
      c10::impl::VirtualGuardImpl(event.device_type()).getStreamFromGlobalPool(event.device());
  event.block(waiting);
  waiting.synchronize();
#endif
}

}  // namespace torchspan::device::compat
