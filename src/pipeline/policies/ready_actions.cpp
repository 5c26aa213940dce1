#include "pipeline/policies/ready_actions.h"

#include <utility>

namespace torchspan::pipeline {

using schedule::Action;
using schedule::ActionKind;

ReadyActions::ReadyActions(const LocalPipeline& local, const StepBegin& begin, const schedule::Table* table)
    : local_(local),
      kind_(begin.kind),
      micro_batches_(static_cast<int>(begin.rows.size())),
      table_(table),
      policy_(make_policy(false)),
      left_(count(false)),
      backwards_allowed_(begin.kind == StepKind::kTrain) {}

std::unique_ptr<Policy> ReadyActions::make_policy(bool backwards) const {
  if (table_ == nullptr) {
    ArrivalLimits limits;
    if (local_.owns_layer_range(0) && kind_ != StepKind::kForward) {
      const int limit = local_.options.max_in_flight;
      limits = {0, limit > 0 ? limit : 2 * static_cast<int>(local_.ranks.size()), has_backwards(kind_)};
    }
    return make_arrival_policy(limits);
  }
  std::vector<Action> row = table_->actions[static_cast<std::size_t>(local_.me)];
  if (kind_ == StepKind::kForward) {
    std::erase_if(row,
                  [&](const Action& action) { return (action.kind != ActionKind::kForward) != backwards; });
  }
  return make_table_policy(std::move(row));
}

int ReadyActions::count(bool backwards) const {
  int ranges = 0;
  for (int range = 0; range <= local_.last_layer_range(); ++range)
    ranges += local_.owns_layer_range(range) ? 1 : 0;
  const int parts = kind_ == StepKind::kTrain && !backwards ? 2 : 1;
  return ranges * micro_batches_ * parts;
}

void ReadyActions::begin_backwards() {
  backwards_allowed_ = true;
  policy_ = make_policy(true);
  left_ = count(true);
  for (const Action& action : std::exchange(early_, {})) policy_->became_ready(action);
}

void ReadyActions::became_ready(const Action& action) {
  if (action.kind == ActionKind::kForward || backwards_allowed_) {
    policy_->became_ready(action);
  } else {
    early_.push_back(action);
  }
}

std::optional<Action> ReadyActions::next_backward() const {
  return backwards_allowed_ ? policy_->next_backward() : std::nullopt;
}

}  // namespace torchspan::pipeline
