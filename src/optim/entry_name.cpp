#include "optim/api/entry_name.h"

#include <string_view>

namespace torchspan::optim {
namespace {

constexpr std::string_view kParameter = ".parameter.";

/// "group.0.parameter.weight" of "group.0.parameter.weight.exp_avg"; empty if `key` is not an entry of a parameter.
std::string owner_of(const std::string& key) {
  const std::size_t mark = key.find(kParameter), dot = key.rfind('.');
  if (!key.starts_with("group.") || mark == std::string::npos || dot < mark + kParameter.size()) return {};
  return key.substr(0, dot);
}

}  // namespace

std::string owner_name(const std::string& label, const std::string& parameter) {
  return "group." + label + std::string(kParameter) + parameter;
}

std::vector<OwnedParameter> owned_parameters(const Optimizer& optimizer, const StateDict& state) {
  const std::vector<at::Tensor> parameters = optimizer.parameters();
  std::vector<OwnedParameter> owned;
  for (const auto& item : state) {  // in the same order, at least one entry of each
    std::string owner = owner_of(item.key());
    if (owner.empty() || (!owned.empty() && owned.back().owner == owner)) continue;
    owned.push_back({std::move(owner), parameters.at(owned.size())});
  }
  return owned;
}

}  // namespace torchspan::optim
