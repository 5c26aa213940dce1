#pragma once
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::optim {

/// Throws Error{kInvalid} naming the parameter if DistributedDataParallel averages its gradient, or another
/// optimizer steps it, during the pass.
void refuse_shared_gradient(const at::Tensor& parameter, const std::string& name);

}  // namespace torchspan::optim
