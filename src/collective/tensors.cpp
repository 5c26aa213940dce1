#include "collective/tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

std::string different_shapes(std::size_t rank, at::IntArrayRef theirs, at::IntArrayRef own) {
  return fmt::format(
      "all_gather_into_tensor needs tensors of one shape, but that of rank {} is [{}] and this rank's [{}]: "
      "use all_gather()",
      rank, fmt::join(theirs.vec(), ", "), fmt::join(own.vec(), ", "));
}

}  // namespace torchspan::collective
