#pragma once
#include <cstddef>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

/// Conversions between callers' tensors and the contiguous memory that backends use.
namespace torchspan::collective {

/// Returns the dense tensor itself, or a contiguous copy without pending conjugation or negation.
at::Tensor plain(const at::Tensor& tensor);
/// Copies a result to the caller's tensor, unless they share memory, and increments that tensor's version.
/// Returns it. Autograd does not record this.
at::Tensor put_back(const at::Tensor& worked_on, const at::Tensor& tensor);
/// The error of an all_gather_into_tensor() whose tensor on `rank` has another shape than this rank's.
std::string different_shapes(std::size_t rank, at::IntArrayRef theirs, at::IntArrayRef own);

}  // namespace torchspan::collective
