#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/collective.h>

namespace torchspan::testing {

/// One step of a reduction, by LibTorch alone. For bool, its sum is "any" and its product "all". A step of an average
/// is one of the sum.
inline at::Tensor reduce_step(const at::Tensor& a, const at::Tensor& b, collective::ReduceOp reduction) {
  switch (reduction) {
    case collective::kSum:
    case collective::kAvg:
      return a + b;
    case collective::kMin:
      return at::minimum(a, b);
    case collective::kMax:
      return at::maximum(a, b);
    case collective::kProduct:
      return a * b;
    case collective::kBitAnd:
      return at::bitwise_and(a, b);
    case collective::kBitOr:
      return at::bitwise_or(a, b);
    case collective::kBitXor:
      return at::bitwise_xor(a, b);
  }
  return {};
}

}  // namespace torchspan::testing
