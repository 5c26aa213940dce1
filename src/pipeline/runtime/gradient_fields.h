#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// The sum of two gradients of one parameter; either may be undefined or sparse.
at::Tensor sum_of_gradients(const at::Tensor& a, const at::Tensor& b);
/// Sets `.grad` of a parameter to the gradient of earlier steps, which it may change, plus that of this step.
void put_gradient(const at::Tensor& parameter, at::Tensor before, at::Tensor gradient);

}  // namespace torchspan::pipeline
