#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/sharded/unit_forward.h>

#include "sharded/units/flat_parameters.h"

namespace torch::nn {
class Module;
}

namespace torchspan::sharded {

/// One unit of a module, before it is divided.
struct ListedUnit {
  std::string name;                                ///< empty: the root
  UnitModule* module = nullptr;                    ///< null: the root
  std::shared_ptr<Unit> divided;                   ///< by a UnitBuilder; null: not yet
  std::vector<std::vector<NamedParameter>> parts;  ///< by dtype and whether they are trained; none are empty
};

/// The units of a module, the root first, each parameter once under its first name. Those in `built` are divided
/// already, and their parameters get their names here. Throws Error{kInvalid} for a unit that is divided otherwise, and
/// for a built one that shares a parameter; Error{kUnsupported} for a parameter that is not on one device with others.
std::vector<ListedUnit> units_of(torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& built);
/// Throws Error{kInvalid} if one of `built` is not among the units.
void check_built(const std::vector<ListedUnit>& units, const std::vector<std::shared_ptr<Unit>>& built);

}  // namespace torchspan::sharded
