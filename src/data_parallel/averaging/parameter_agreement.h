#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "data_parallel/api/agreement.h"

namespace torchspan::data_parallel {

/// What the ranks that average `parameters` must have in common. Records as a failure of this rank a tensor
/// that cannot be averaged. Ranks that have different parts of a parameter do not agree.
Agreement agreement_on(const collective::Group& group, const std::vector<at::Tensor>& parameters,
                       std::vector<std::pair<std::string, std::string>> settings);

/// Whether ranks average the tensor. Those of integers cannot be trained: they must be alike, and stay as they are.
bool is_averaged(const at::Tensor& tensor);

/// What this rank has of a parameter: the tensor, or its part.
at::Tensor averaged_elements(const at::Tensor& parameter);

/// "parameter 3": these tensors have no names.
std::string parameter_name(std::size_t index);

}  // namespace torchspan::data_parallel
