#pragma once
#include <string>
#include <vector>

#include <torchspan/state/source.h>

namespace torch::nn {
class Module;
}

namespace torchspan::state {

/// A parameter or buffer with all its names; several if layers share it.
struct ModuleTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
};

/// Appends the parameters and buffers of a module, each tensor once, with `prefix` before the names.
void append_module_tensors(std::vector<ModuleTensor>& all, const torch::nn::Module& module,
                           const std::string& prefix);

/// Saves each tensor under its first name.
void save_module_tensors(StateWriter& writer, const std::vector<ModuleTensor>& tensors);

struct LoadRules {
  bool allow_missing = false;
  bool allow_unexpected = false;  ///< tensors of the checkpoint that the module lacks
  bool cast = false;
};

/// Loads every tensor, from any of its names; checks all before it changes one. Throws Error{kInvalid} that
/// lists what does not fit.
void load_module_tensors(const StateReader& reader, const std::vector<ModuleTensor>& tensors,
                         const LoadRules& rules);

}  // namespace torchspan::state
