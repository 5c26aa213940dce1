#include "sharded/state/entry_name.h"

#include <string_view>

namespace torchspan::sharded {
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

std::vector<std::string> owners_of(const optim::Optimizer& optimizer) {
  std::vector<std::string> owners;
  for (const auto& item : optimizer.state_view()) {  // has at least one entry of each parameter
    EntryName name(item.key());
    if (!name.owner.empty() && (owners.empty() || owners.back() != name.owner))
      owners.push_back(std::move(name.owner));
  }
  return owners;
}

}  // namespace torchspan::sharded
