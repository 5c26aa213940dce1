#include "data_parallel/passes/parameter_slots.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "engine/api/graph_walk.h"

namespace torchspan::data_parallel {
namespace {

constexpr std::size_t kNamesInAMessage = 10;

Reducer::Replicas trainable(Reducer::Replicas replicas) {
  for (auto& replica : replicas) {
    std::erase_if(replica, [](const Parameter& parameter) { return !parameter.tensor.requires_grad(); });
  }
  return replicas;
}

}  // namespace

ParameterSlots::ParameterSlots(const Reducer::Replicas& replicas)
    : replicas_(trainable(replicas)), count_(replicas_[0].size()) {
  for (const Parameter& parameter : replicas[0]) {
    if (!parameter.tensor.requires_grad()) frozen_.push_back(parameter);
  }
  for (std::size_t slot = 0; slot < size(); ++slot)
    slot_of_.emplace(tensor(slot).unsafeGetTensorImpl(), slot);
}

std::string ParameterSlots::names(const std::vector<std::size_t>& slots) const {
  std::string text;
  for (std::size_t i = 0; i < std::min(slots.size(), kNamesInAMessage); ++i) {
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", name(slots[i]));
  }
  if (slots.size() > kNamesInAMessage) text += fmt::format(" and {} more", slots.size() - kNamesInAMessage);
  return text;
}

std::vector<std::size_t> ParameterSlots::unreached_from(const std::vector<at::Tensor>& outputs) const {
  std::vector<bool> reached(size());
  for (const at::Tensor& leaf : engine::leaf_tensors(outputs)) {
    const auto found = slot_of_.find(leaf.unsafeGetTensorImpl());
    if (found != slot_of_.end()) reached[found->second] = true;
  }
  std::vector<std::size_t> unreached;
  for (std::size_t slot = 0; slot < size(); ++slot) {
    if (!reached[slot]) unreached.push_back(slot);
  }
  return unreached;
}

void ParameterSlots::check_frozen() const {
  for (const Parameter& parameter : frozen_) {
    if (!parameter.tensor.requires_grad()) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' required no gradient when it was wrapped, and requires one now; wrap the "
                    "module again",
                    parameter.name));
  }
}

}  // namespace torchspan::data_parallel
