#include "schedule/greedy_order.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>

namespace torchspan::schedule {

GreedyOrder::GreedyOrder(Table table, const std::vector<Costs>& costs, double memory_limit,
                         const GreedyRules& rules)
    : table_(std::move(table)),
      costs_(costs),
      rules_(rules),
      memory_(table_, costs, memory_limit),
      ranks_(table_.actions.size()),
      alive_(table_.rank_of_stage.size(), 0) {}

Table GreedyOrder::run() {
  arrive({ActionKind::kForward, 0, 0}, Duration::zero());
  while (!wakes_.empty()) {
    const auto [now, rank] = wakes_.top();
    wakes_.pop();
    if (ranks_[rank].free_at <= now) wake(rank, now);
  }
  return std::move(table_);
}

Duration GreedyOrder::cost_of(const Action& action) const {
  const Costs& costs = costs_of(action.stage);
  if (action.kind == ActionKind::kForward) return costs.forward;
  return action.kind == ActionKind::kInputGradient ? costs.input_gradient : costs.weight_gradient;
}

bool GreedyOrder::is_better(const Action& action, const Action& other) const {
  const bool forward = action.kind == ActionKind::kForward;
  if (action.kind != other.kind) return forward != rules_.backward_first;
  if (!forward) return std::tie(action.micro_batch, other.stage) < std::tie(other.micro_batch, action.stage);
  if (action.stage != other.stage) return (action.stage > other.stage) == rules_.late_stage_first;
  return action.micro_batch < other.micro_batch;
}

std::vector<GreedyOrder::Arrival>::iterator GreedyOrder::find_ready(std::size_t at, Duration now) {
  auto& arrivals = ranks_[at].arrivals;
  auto best = arrivals.end();
  for (auto one = arrivals.begin(); one != arrivals.end(); ++one) {
    if (one->when > now || (best != arrivals.end() && !is_better(one->action, best->action))) continue;
    if (one->action.kind == ActionKind::kForward && !is_admitted(one->action)) continue;
    best = one;
  }
  return best;
}

bool GreedyOrder::is_admitted(const Action& forward) const {
  const int alive = alive_[static_cast<std::size_t>(forward.stage)];
  const int following = table_.stages() - 1 - forward.stage;
  if (alive >= 1 + (following == 0 ? 0 : rules_.ahead * following)) return false;
  return memory_.admits(forward);
}

bool GreedyOrder::should_fill(const Rank& rank, Duration now) const {
  if (rank.pending.empty()) return false;
  std::optional<Duration> gap;
  for (const Arrival& arrival : rank.arrivals) {
    if (arrival.when > now && (!gap || arrival.when - now < *gap)) gap = arrival.when - now;
  }
  const auto length = static_cast<double>(cost_of(rank.pending.front()).count());
  return !gap || static_cast<double>(gap->count()) >= rules_.least_gap * length;
}

void GreedyOrder::wake(std::size_t at, Duration now) {
  Rank& rank = ranks_[at];
  const auto ready = find_ready(at, now);
  if (ready != rank.arrivals.end()) {
    const Action action = ready->action;
    rank.arrivals.erase(ready);
    start(at, action, now);
  } else if (should_fill(rank, now)) {
    const Action action = rank.pending.front();
    rank.pending.pop();
    start(at, action, now);
  }
}

void GreedyOrder::start(std::size_t at, const Action& action, Duration now) {
  const Duration end = now + cost_of(action);
  ranks_[at].free_at = end;
  table_.actions[at].push_back(action);
  memory_.start(action);
  int& alive = alive_[static_cast<std::size_t>(action.stage)];
  if (action.kind == ActionKind::kForward) ++alive;
  if (action.kind == ActionKind::kInputGradient) --alive;
  send_next(action, end);
  wakes_.emplace(end, at);
}

void GreedyOrder::arrive(const Action& action, Duration when) {
  const std::size_t rank = rank_of(action.stage);
  ranks_[rank].arrivals.push_back({when, action});
  wakes_.emplace(when, rank);
}

void GreedyOrder::send_next(const Action& action, Duration end) {
  const std::size_t rank = rank_of(action.stage);
  const auto send = [&](const Action& next) {
    arrive(next, end + (rank_of(next.stage) == rank ? Duration::zero() : costs_of(action.stage).transfer));
  };
  const auto [kind, stage, i] = action;
  if (kind == ActionKind::kWeightGradient) return;
  if (kind == ActionKind::kForward) {
    if (stage == 0 && i + 1 < table_.micro_batches) send({kind, 0, i + 1});
    send(stage + 1 < table_.stages() ? Action{kind, stage + 1, i}
                                     : Action{ActionKind::kInputGradient, stage, i});
    return;
  }
  ranks_[rank].pending.push({ActionKind::kWeightGradient, stage, i});
  if (stage > 0) send({kind, stage - 1, i});
}

}  // namespace torchspan::schedule
