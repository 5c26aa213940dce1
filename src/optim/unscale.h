#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::optim {

/// Divides gradients, each of which is listed once, by `scale`, in place, and returns whether an element was not
/// finite. Waits once, however many devices and tensors there are (coalescing of sparse gradients aside). Float and
/// half gradients of devices that have LibTorch's operator for this are read and written once, in one launch for each
/// device and dtype.
bool unscale_gradients(const std::vector<at::Tensor>& gradients, double scale);

}  // namespace torchspan::optim
