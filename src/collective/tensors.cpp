#include "collective/tensors.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

namespace torchspan::collective {

at::Tensor plain(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor put_back(const at::Tensor& worked_on, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  if (worked_on.data_ptr() != tensor.data_ptr()) tensor.detach().copy_(worked_on);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return tensor;
}

}  // namespace torchspan::collective
