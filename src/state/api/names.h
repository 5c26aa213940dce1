#pragma once
#include <string>

namespace torchspan::state {

/// "prefix.name", or the one of them that is not empty.
inline std::string join_names(const std::string& prefix, const std::string& name) {
  if (prefix.empty()) return name;
  return name.empty() ? prefix : prefix + "." + name;
}

}  // namespace torchspan::state
