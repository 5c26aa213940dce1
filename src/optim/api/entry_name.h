#pragma once
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/optim/optimizer.h>

namespace torchspan::optim {

/// Names of an entry of an optimizer's state: "weight" and "exp_avg" of "group.0.parameter.weight.exp_avg". All are
/// empty if `key` is not an entry of a parameter.
struct EntryName {
  explicit EntryName(const std::string& key);

  std::string parameter, entry;
  std::string owner;  ///< "group.0.parameter.weight"
};

/// "group.0.parameter.weight"; `label`: of the group.
std::string owner_name(const std::string& label, const std::string& parameter);

struct OwnedParameter {
  std::string owner;  ///< EntryName::owner of its entries
  at::Tensor tensor;
};
/// The parameters of an optimizer, in the order of parameters().
std::vector<OwnedParameter> owned_parameters(const Optimizer& optimizer);

}  // namespace torchspan::optim
