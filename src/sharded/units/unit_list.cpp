#include "sharded/units/unit_list.h"

#include <fmt/format.h>
#include <map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {
namespace {

/// Walks a module; finds the unit of each parameter.
class Walk {
 public:
  explicit Walk(torch::nn::Module& module) {
    units_.emplace_back();
    visit(module, "", 0);
  }
  std::size_t unit_of(const at::Tensor& tensor) const { return unit_of_.at(tensor.unsafeGetTensorImpl()); }
  std::vector<ListedUnit> take() { return std::move(units_); }

 private:
  void visit(torch::nn::Module& module, const std::string& name, std::size_t unit) {
    if (auto* found = dynamic_cast<UnitModule*>(&module)) {
      const auto [place, is_new] = index_of_.emplace(found, units_.size());
      unit = place->second;
      if (is_new) {
        if (found->unit) {
          throw Error(
              ErrorKind::kInvalid,
              fmt::format("unit '{}' is divided by a FullyShardedDataParallel already; wrap it once", name));
        }
        units_.push_back({name, found, {}});
      }
    }
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      const auto [place, is_new] = unit_of_.emplace(item.value().unsafeGetTensorImpl(), unit);
      if (!is_new && place->second != unit)
        place->second = 0;  // shared between units: in the root, always gathered
    }
    for (const auto& child : module.named_children())
      visit(*child.value(), name.empty() ? child.key() : name + "." + child.key(), unit);
  }

  std::vector<ListedUnit> units_;
  std::map<UnitModule*, std::size_t> index_of_;
  std::map<const c10::TensorImpl*, std::size_t> unit_of_;
};

}  // namespace

std::vector<ListedUnit> units_of(torch::nn::Module& module) {
  Walk walk(module);
  std::vector<std::map<std::pair<at::ScalarType, bool>, std::vector<NamedParameter>>> parts;
  std::map<const c10::TensorImpl*, bool> seen;
  at::Tensor first;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.emplace(tensor.unsafeGetTensorImpl(), true).second) continue;
    if (!first.defined()) first = tensor;
    if (tensor.layout() != at::kStrided || tensor.device() != first.device()) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format("parameter '{}' is on {} and the first one on {}; all must be dense and on one device",
                      item.key(), tensor.device().str(), first.device().str()));
    }
    const std::size_t unit = walk.unit_of(tensor);
    if (parts.size() <= unit) parts.resize(unit + 1);
    parts[unit][{tensor.scalar_type(), tensor.requires_grad()}].push_back({item.key(), tensor});
  }
  std::vector<ListedUnit> units = walk.take();
  for (std::size_t unit = 0; unit < parts.size(); ++unit) {
    for (auto& [kind, parameters] : parts[unit]) units[unit].parts.push_back(std::move(parameters));
  }
  return units;
}

}  // namespace torchspan::sharded
