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

}  // namespace torchspan::sharded
