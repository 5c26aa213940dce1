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

/// What this rank has of each parameter: the tensor, or its part.
std::vector<at::Tensor> averaged_elements(const std::vector<at::Tensor>& parameters);

/// "parameter 3": these tensors have no names.
std::string parameter_name(std::size_t index);

}  // namespace torchspan::data_parallel
