#pragma once
#include <string>

namespace torchspan::sharded {

/// Names of an entry of an optimizer's state: "weight" and "exp_avg" of "group.0.parameter.weight.exp_avg". All are
/// empty if `key` is not an entry of a parameter.
struct EntryName {
  explicit EntryName(const std::string& key);

  std::string parameter, entry;
  std::string owner;  ///< "group.0.parameter.weight"
};

}  // namespace torchspan::sharded
