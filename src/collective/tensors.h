#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

/// Between the tensors that callers give and the plain memory that back ends work on.
namespace torchspan::collective {

/// What is read of a dense tensor: itself, or a contiguous copy without pending conjugation or negation.
at::Tensor plain(const at::Tensor& tensor);
/// Puts a result into the tensor that the caller gave, if that was worked on in a copy, and counts it as a
/// change of that tensor, which is returned. Autograd sees nothing.
at::Tensor put_back(const at::Tensor& worked_on, const at::Tensor& tensor);

}  // namespace torchspan::collective
