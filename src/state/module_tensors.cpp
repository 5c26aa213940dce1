#include "state/api/module_tensors.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "state/api/at_place.h"
#include "state/api/names.h"

namespace torchspan::state {
namespace {

constexpr std::size_t kMostListed = 8;

std::string listed(const std::vector<std::string>& names) {
  const std::size_t shown = std::min(names.size(), kMostListed);
  std::string text = fmt::format("'{}'", fmt::join(names.begin(), names.begin() + shown, "', '"));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

/// What this rank has of a tensor of the module, and the names under which the checkpoint has it.
struct Found {
  at::Tensor elements;
  PlacePtr place;
  std::vector<std::string> names = {};
};

/// Throws Error{kInvalid} if the names of a tied tensor have different values: all but one would be lost.
void require_one_value(const StateReader& reader, const Found& tied) {
  if (tied.names.size() < 2) return;
  const at::Tensor first = reader.read(tied.names.front());
  for (std::size_t i = 1; i < tied.names.size(); ++i) {
    const at::Tensor other = reader.read(tied.names[i]);
    if (first.scalar_type() == other.scalar_type() && at::equal(first, other)) continue;
    throw_invalid(
        fmt::format("'{}' and '{}' are one tensor in this program, but have different values in the "
                    "checkpoint: load it into a module in "
                    "which they are not tied, or remove one of them from the file",
                    reader.full_name(tied.names.front()), reader.full_name(tied.names[i])));
  }
}

}  // namespace

void append_module_tensors(std::vector<ModuleTensor>& all, const torch::nn::Module& module,
                           const std::string& prefix) {
  std::map<const c10::TensorImpl*, std::size_t> places;
  for (std::size_t i = 0; i < all.size(); ++i) places.emplace(all[i].tensor.unsafeGetTensorImpl(), i);
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;  // an option of the layer left it out
    const auto [place, is_new] = places.emplace(tensor.unsafeGetTensorImpl(), all.size());
    if (is_new) all.push_back({{}, tensor});
    all[place->second].names.push_back(join_names(prefix, name));
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
}

void save_module_tensors(StateWriter& writer, const std::vector<ModuleTensor>& tensors) {
  for (const ModuleTensor& entry : tensors) {
    const PlacePtr place = place_of(entry.tensor);
    save_at_place(writer, entry.names.front(), elements_of(entry.tensor, place), place);
  }
}

void load_module_tensors(const StateReader& reader, const std::vector<ModuleTensor>& tensors,
                         const LoadRules& rules) {
  std::vector<std::string> missing;
  std::vector<Found> found;
  std::set<std::string> known, known_of_ranks;
  for (const ModuleTensor& entry : tensors) {
    Found one{{}, place_of(entry.tensor)};
    one.elements = elements_of(entry.tensor, one.place);
    for (const std::string& name : entry.names) {
      (one.place && one.place->own ? known_of_ranks : known).insert(name);
      if (auto saved = saved_name(reader, name, one.place)) one.names.push_back(std::move(*saved));
    }
    if (!one.names.empty()) {
      found.push_back(std::move(one));
    } else if (!rules.allow_missing) {
      missing.push_back(reader.full_name(entry.names.front()));
    }
  }
  std::vector<std::string> unknown;
  if (!rules.allow_unexpected) {
    for (const std::string& name : reader.names()) {
      const bool of_rank =
          known_of_ranks.contains(name) || known_of_ranks.contains(name_of_any_rank(name).value_or(""));
      if (!known.contains(name) && !of_rank) unknown.push_back(reader.full_name(name));
    }
  }
  if (!missing.empty() || !unknown.empty()) {
    std::string text = "the checkpoint does not fit the module";
    if (!missing.empty()) text += fmt::format("; it lacks {}", listed(missing));
    if (!unknown.empty()) text += fmt::format("; the module lacks {}", listed(unknown));
    throw_invalid(text);
  }
  for (const Found& one : found) {
    for (const std::string& name : one.names)
      check_at_place(reader, name, one.elements, one.place, rules.cast);
    require_one_value(reader, one);
  }
  const at::NoGradGuard no_grad;
  for (const Found& one : found) load_at_place(reader, one.names.front(), one.elements.detach(), one.place);
}

}  // namespace torchspan::state
