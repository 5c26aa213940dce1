#include "optim/api/entry_name.h"

#include <string_view>

namespace torchspan::optim {
namespace {

constexpr std::string_view kParameter = ".parameter.";

}  // namespace

EntryName::EntryName(const std::string& key) {
  const std::size_t mark = key.find(kParameter), dot = key.rfind('.');
  if (!key.starts_with("group.") || mark == std::string::npos || dot < mark + kParameter.size()) return;
  parameter = key.substr(mark + kParameter.size(), dot - mark - kParameter.size());
  entry = key.substr(dot + 1);
  owner = key.substr(0, dot);
}

std::string owner_name(const std::string& label, const std::string& parameter) {
  return "group." + label + std::string(kParameter) + parameter;
}

std::vector<OwnedParameter> owned_parameters(const Optimizer& optimizer) {
  const std::vector<at::Tensor> parameters = optimizer.parameters();
  std::vector<OwnedParameter> owned;
  for (const auto& item : optimizer.state_view()) {  // in the same order, at least one entry of each
    EntryName name(item.key());
    if (name.owner.empty() || (!owned.empty() && owned.back().owner == name.owner)) continue;
    owned.push_back({std::move(name.owner), parameters.at(owned.size())});
  }
  return owned;
}

}  // namespace torchspan::optim
