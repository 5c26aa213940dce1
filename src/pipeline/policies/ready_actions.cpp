#include "pipeline/policies/ready_actions.h"

#include <algorithm>
#include <utility>

namespace torchspan::pipeline {

using schedule::Action;
using schedule::ActionKind;

ReadyActions::ReadyActions(const LocalPipeline& local, const StepBegin& begin, const schedule::Table* table)
    : local_(local),
      kind_(begin.kind),
      micro_batches_(static_cast<int>(begin.rows.size())),
      table_(table),
      backwards_allowed_(begin.kind == StepKind::kTrain) {
  this->begin(false);
}

std::vector<Action> ReadyActions::row(bool backwards) const {
  std::vector<Action> row = table_->actions[static_cast<std::size_t>(local_.me)];
  if (kind_ == StepKind::kForward) {
    std::erase_if(row,
                  [&](const Action& action) { return (action.kind != ActionKind::kForward) != backwards; });
  }
  return row;
}

void ReadyActions::begin(bool backwards) {
  if (table_ != nullptr) {
    std::vector<Action> actions = row(backwards);
    left_ = static_cast<int>(actions.size());
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kInputGradient) split_.insert(action);
    }
    policy_ = make_table_policy(std::move(actions));
    return;
  }
  int ranges = 0;
  for (int range = 0; range <= local_.last_layer_range(); ++range)
    ranges += local_.owns_layer_range(range) ? 1 : 0;
  left_ = ranges * micro_batches_ * (kind_ == StepKind::kTrain && !backwards ? 2 : 1);
  ArrivalLimits limits;
  if (local_.owns_layer_range(0) && kind_ != StepKind::kForward) {
    const int limit = local_.options.max_in_flight;
    limits = {0, limit > 0 ? limit : 2 * static_cast<int>(local_.ranks().size()), has_backwards(kind_)};
  }
  policy_ = make_arrival_policy(limits);
}

void ReadyActions::begin_backwards() {
  backwards_allowed_ = true;
  begin(true);
  for (const Action& action : std::exchange(early_, {})) policy_->became_ready(action);
}

void ReadyActions::became_ready(Action action) {
  if (action.kind == ActionKind::kBackward && !split_.empty()) {
    const Action part{ActionKind::kInputGradient, action.stage, action.micro_batch};
    if (split_.contains(part)) action = part;
  }
  if (action.kind == ActionKind::kForward || backwards_allowed_) {
    policy_->became_ready(action);
  } else {
    early_.push_back(action);
  }
}

std::optional<Action> ReadyActions::next() {
  return held_ ? std::exchange(held_, std::nullopt) : policy_->next();
}

std::optional<Action> ReadyActions::next_within(int live) {
  if (!held_) held_ = policy_->next();
  if (held_ && held_->kind == ActionKind::kForward && live >= most_live()) return std::nullopt;
  return std::exchange(held_, std::nullopt);
}

int ReadyActions::most_live() const {
  int live = 0, most = 0;
  for (const Action& action : row(false)) {
    if (action.kind == ActionKind::kForward) most = std::max(most, ++live);
    if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kWeightGradient) --live;
  }
  return most;
}

std::optional<Action> ReadyActions::next_backward() const {
  return backwards_allowed_ ? policy_->next_backward() : std::nullopt;
}

}  // namespace torchspan::pipeline
