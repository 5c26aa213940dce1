#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>

namespace torchspan::collective {

/// A backend that has this base writes all ranks' tensors to their places in one tensor, without a copy in between.
class GathersInPlace {
 public:
  virtual ~GathersInPlace() = default;
  /// As Group::all_gather_into_tensor(), which has checked the arguments. `tensor` may be this rank's part of `output`.
  virtual Future<at::Tensor> all_gather_into(at::Tensor output, at::Tensor tensor) = 0;
};

}  // namespace torchspan::collective
