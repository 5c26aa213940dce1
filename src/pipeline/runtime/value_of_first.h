#pragma once
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/rpc/worker.h>

namespace torchspan::pipeline {

/// Returns the value that the first of `workers` has of a tensor, on the CPU. Collective over `workers`, each of which
/// passes a tensor of the same shape and dtype. `what` names it in errors.
at::Tensor value_of_first(const Worker& worker, const std::vector<std::string>& workers,
                          const at::Tensor& tensor, const std::string& what);

}  // namespace torchspan::pipeline
