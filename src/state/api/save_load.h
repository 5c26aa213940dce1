#pragma once
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/state/source.h>

#include "state/api/place.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim
namespace torch::serialize {
class InputArchive;
}  // namespace torch::serialize

namespace torchspan::state {

/// "prefix.name", or the one of them that is not empty.
inline std::string join_names(const std::string& prefix, const std::string& name) {
  if (prefix.empty()) return name;
  return name.empty() ? prefix : prefix + "." + name;
}

/// What this rank has of a parameter or buffer at `place`, which is the tensor itself unless the place names other elements.
const at::Tensor& elements_of(const at::Tensor& tensor, const PlacePtr& place);

/// Saves the elements that this rank has of a tensor at `place`: the whole tensor, boxes of it, or, under a name of this
/// rank, what is its own.
void save_at_place(StateWriter& writer, const std::string& name, const at::Tensor& elements,
                   const PlacePtr& place);

/// Under which name the checkpoint has such a tensor for this rank; nullopt if it has none. If it has only those of other
/// ranks: that of the only one, or of any one if they are `exchangeable`; otherwise throws Error{kInvalid}.
std::optional<std::string> saved_name(const StateReader& reader, const std::string& name,
                                      const PlacePtr& place, bool exchangeable = false);

/// As StateReader::check(), with the shape of the whole tensor.
void check_at_place(const StateReader& reader, const std::string& saved, const at::Tensor& elements,
                    const PlacePtr& place, bool cast = false);
/// Loads what check_at_place() has checked; another dtype is converted.
void load_at_place(const StateReader& reader, const std::string& saved, const at::Tensor& elements,
                   const PlacePtr& place);

/// "name.rank3" of a tensor that rank 3 has as its own.
std::string own_name(const std::string& name, const Place& place);
/// The name without ".rank" and a number; nullopt if it does not end so.
std::optional<std::string> name_of_any_rank(const std::string& name);

/// A parameter or buffer with all its names; several if layers share it.
struct ModuleTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  bool is_buffer = false;
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

/// Loads the state of one of LibTorch's optimizers: it then has what the archive has. Optimizer::load() keeps the state of
/// parameters that the archive lacks, which is newer than what it restores. If loading throws, the state is as before.
void load_exactly(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

}  // namespace torchspan::state
