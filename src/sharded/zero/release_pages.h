#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::sharded {

/// Returns the whole pages of a contiguous tensor on the CPU to the system, in memory that processes share or not. The
/// values there are then lost, and usually zero; writing takes memory again. Nothing for tensors on a device.
void release_pages(const at::Tensor& values);

}  // namespace torchspan::sharded
