#include "checkpoint/sources/module_tensors.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "checkpoint/state/names.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::size_t kMostListed = 8;

std::string listed(const std::vector<std::string>& names) {
  const std::size_t shown = std::min(names.size(), kMostListed);
  std::string text = fmt::format("'{}'", fmt::join(names.begin(), names.begin() + shown, "', '"));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
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
  for (const ModuleTensor& entry : tensors) writer.add(entry.names.front(), entry.tensor);
}

void load_module_tensors(const StateReader& reader, const std::vector<ModuleTensor>& tensors,
                         const LoadRules& rules) {
  std::vector<std::string> missing;
  std::vector<std::pair<std::string, at::Tensor>> found;
  std::set<std::string> known;
  for (const ModuleTensor& entry : tensors) {
    known.insert(entry.names.begin(), entry.names.end());
    const auto name = std::ranges::find_if(entry.names, [&](const auto& any) { return reader.has(any); });
    if (name != entry.names.end()) {
      found.emplace_back(*name, entry.tensor);
    } else if (!rules.allow_missing) {
      missing.push_back(reader.full_name(entry.names.front()));
    }
  }
  std::vector<std::string> unknown;
  if (!rules.allow_unexpected) {
    for (const std::string& name : reader.names()) {
      if (!known.contains(name)) unknown.push_back(reader.full_name(name));
    }
  }
  if (!missing.empty() || !unknown.empty()) {
    std::string text = "the checkpoint does not fit the module";
    if (!missing.empty()) text += fmt::format("; it lacks {}", listed(missing));
    if (!unknown.empty()) text += fmt::format("; the module lacks {}", listed(unknown));
    throw_invalid(text);
  }
  for (const auto& [name, tensor] : found) reader.check(name, tensor, rules.cast);
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : found) {
    if (reader.dtype_of(reader.full_name(name)) != tensor.scalar_type()) {
      tensor.detach().copy_(reader.read(name));
    } else {
      reader.read_into(name, tensor);
    }
  }
}

}  // namespace torchspan::checkpoint
