#include "sharded/zero/unit_waits.h"

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

namespace torchspan::sharded {

UnitWaits::UnitWaits(torch::nn::Module& module, const BucketOf& bucket_of,
                     const std::function<void(std::size_t)>& wait) {
  visit(module, nullptr);
  std::map<UnitModule*, std::set<std::size_t>> buckets;
  for (const auto& [parameter, unit] : unit_of_) {
    const auto found = bucket_of.find(parameter);
    if (found != bucket_of.end()) (unit != nullptr ? buckets[unit] : others_).insert(found->second);
  }
  for (const auto& [unit, its] : buckets) {
    units_.push_back(unit);
    unit->before_forward = [its = its, wait] {
      for (const std::size_t bucket : its) wait(bucket);
    };
  }
}

UnitWaits::~UnitWaits() {
  for (UnitModule* unit : units_) unit->before_forward = nullptr;
}

void UnitWaits::visit(torch::nn::Module& module, UnitModule* unit) {
  if (auto* found = dynamic_cast<UnitModule*>(&module)) unit = found;
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (!item.value().defined()) continue;
    const auto [place, is_new] = unit_of_.emplace(item.value().unsafeGetTensorImpl(), unit);
    if (!is_new && place->second != unit) place->second = nullptr;
  }
  for (const auto& child : module.named_children()) visit(*child.value(), unit);
}

}  // namespace torchspan::sharded
