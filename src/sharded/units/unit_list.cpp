#include "sharded/units/unit_list.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "sharded/state/overlapping.h"
#include "sharded/units/unit.h"

namespace torchspan::sharded {
namespace {

/// Walks a module; finds the unit of each parameter.
class Walk {
 public:
  Walk(torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& built) : built_(built) {
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
        const bool is_built = std::find(built_.begin(), built_.end(), found->unit) != built_.end();
        if (found->unit && !is_built) {
          throw Error(
              ErrorKind::kInvalid,
              fmt::format("unit '{}' is divided by a FullyShardedDataParallel already; wrap it once", name));
        }
        units_.push_back({name, found, found->unit, {}});
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

  const std::vector<std::shared_ptr<Unit>>& built_;
  std::vector<ListedUnit> units_;
  std::map<UnitModule*, std::size_t> index_of_;
  std::map<const c10::TensorImpl*, std::size_t> unit_of_;
};

/// Names a parameter of a divided unit; returns whether the unit is one and has it.
bool name_built(const ListedUnit& unit, const std::string& name, const at::Tensor& tensor) {
  return unit.divided && unit.divided->name_parameter(tensor, name);
}

/// Dividing parameters would end that they share memory.
void check_memory(const torch::nn::Module& module) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    names.push_back(item.key());
    tensors.push_back(item.value());
  }
  if (const auto shared = overlapping(tensors)) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("parameters '{}' and '{}' share memory, which would end: register one tensor in both "
                    "modules",
                    names[shared->first], names[shared->second]));
  }
}

}  // namespace

std::vector<ListedUnit> units_of(torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& built) {
  Walk walk(module, built);
  std::vector<ListedUnit> units = walk.take();
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
          fmt::format(
              "parameter '{}' is on {} and the first one on {}; all must be dense and on one device: call "
              "module->to(device) before the module is sharded",
              item.key(), tensor.device().str(), first.device().str()));
    }
    const std::size_t unit = walk.unit_of(tensor);
    if (name_built(units[unit], item.key(), tensor)) continue;
    for (const auto& other : built) {
      if (!other->name_parameter(tensor, item.key())) continue;
      throw Error(ErrorKind::kInvalid,
                  fmt::format("parameter '{}' is used by several units, but the UnitBuilder has divided it; "
                              "build those units without it",
                              item.key()));
    }
    if (parts.size() <= unit) parts.resize(unit + 1);
    parts[unit][{tensor.scalar_type(), tensor.requires_grad()}].push_back({item.key(), tensor});
  }
  check_memory(module);
  for (std::size_t unit = 0; unit < parts.size(); ++unit) {
    for (auto& [kind, parameters] : parts[unit]) units[unit].parts.push_back(std::move(parameters));
  }
  return units;
}

void check_built(const std::vector<ListedUnit>& units, const std::vector<std::shared_ptr<Unit>>& built) {
  for (std::size_t i = 0; i < built.size(); ++i) {
    const auto is_it = [&](const ListedUnit& unit) { return unit.divided == built[i]; };
    if (std::any_of(units.begin(), units.end(), is_it)) continue;
    throw Error(ErrorKind::kInvalid,
                fmt::format("the module does not contain unit {} of {} that the UnitBuilder has built; "
                            "register each of them with register_module()",
                            i + 1, built.size()));
  }
}

}  // namespace torchspan::sharded
