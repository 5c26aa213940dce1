#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// Reduces tensors of equal shape and dtype in their order, with LibTorch's operators, on their device. Half and
/// bfloat16 are reduced in float and rounded once.
at::Tensor reduce_in_rank_order(const std::vector<at::Tensor>& sources, ReduceOp reduction);

}  // namespace torchspan::collective
