#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <torchspan/collective/group.h>

namespace torchspan::collective {

/// The operation of a process group. Averages are sums that are divided afterwards: not every process group has them.
inline c10d::ReduceOp c10d_op(ReduceOp reduction) {
  switch (reduction) {
    case kMin:
      return c10d::ReduceOp::MIN;
    case kMax:
      return c10d::ReduceOp::MAX;
    case kProduct:
      return c10d::ReduceOp::PRODUCT;
    case kBitAnd:
      return c10d::ReduceOp::BAND;
    case kBitOr:
      return c10d::ReduceOp::BOR;
    case kBitXor:
      return c10d::ReduceOp::BXOR;
    case kSum:
    case kAvg:
      break;
  }
  return c10d::ReduceOp::SUM;
}

}  // namespace torchspan::collective
