#pragma once
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::optim {

/// Throws Error{kInvalid} naming the parameter if somebody else waits for its gradient at the end of a pass:
/// DistributedDataParallel, which averages it then, or another optimizer.
void refuse_shared_gradient(const at::Tensor& parameter, const std::string& name);

/// Whether a reducer averages the parameter's gradient over replicas.
bool is_averaged(const at::Tensor& parameter);

}  // namespace torchspan::optim
