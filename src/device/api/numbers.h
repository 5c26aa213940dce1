#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::device {

/// Reads floating-point tensors of one element each, after the work of this thread's current streams so far. Waits once
/// for each device, however many tensors are there.
std::vector<double> read_numbers(const std::vector<at::Tensor>& tensors);

}  // namespace torchspan::device
