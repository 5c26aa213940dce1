#pragma once
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
  std::vector<std::vector<NamedParameter>> parts;  ///< by dtype and whether they are trained; none are empty
};

/// The units of a module, the root first, each parameter once under its first name. Throws Error{kInvalid} for a
/// module that is divided already, and Error{kUnsupported} for a parameter that is not on one device with the others.
std::vector<ListedUnit> units_of(torch::nn::Module& module);

}  // namespace torchspan::sharded
