#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

/// Converts between the callers' tensors and the plain memory that backends work on.
namespace torchspan::collective {

/// Returns the tensor to read from: a dense tensor itself, or a contiguous copy without pending conjugation
/// or negation.
at::Tensor plain(const at::Tensor& tensor);
/// Copies a result into the caller's tensor, if a copy was used, and marks that tensor as changed in place.
/// Returns the caller's tensor. Autograd does not see the change.
at::Tensor put_back(const at::Tensor& worked_on, const at::Tensor& tensor);

}  // namespace torchspan::collective
