#pragma once
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/optim/optimizer.h>

namespace torchspan::optim {

/// "group.0.parameter.weight", with which the names of a parameter's entries begin; `label`: of the group.
std::string owner_name(const std::string& label, const std::string& parameter);

struct OwnedParameter {
  std::string owner;
  at::Tensor tensor;
};
/// The parameters of an optimizer whose state_view() is `state`, in the order of parameters().
std::vector<OwnedParameter> owned_parameters(const Optimizer& optimizer, const StateDict& state);

}  // namespace torchspan::optim
