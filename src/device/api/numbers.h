#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::device {

/// Reads floating-point tensors of one element each, after the work of this thread's current streams so far. Waits
/// once, however many tensors and devices there are: other devices copy theirs to one of them.
std::vector<double> read_numbers(const std::vector<at::Tensor>& tensors);

}  // namespace torchspan::device
