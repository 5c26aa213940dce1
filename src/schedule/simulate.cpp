#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "schedule/replay.h"

namespace torchspan::schedule {
namespace {

void check_costs(const Table& table, const std::vector<Costs>& costs) {
  if (costs.size() != 1 && costs.size() != table.rank_of_stage.size()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("simulate: costs has {} entries; expected one for all stages, or "
                            "one for each of the {}",
                            costs.size(), table.rank_of_stage.size()));
  }
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    const Costs& cost = costs[stage];
    const Duration least = std::min({cost.forward, cost.input_gradient, cost.weight_gradient, cost.transfer});
    if (least < Duration::zero() || !(cost.activation >= 0)) {
      throw Error(ErrorKind::kInvalid, fmt::format("simulate: costs[{}] has a negative entry", stage));
    }
  }
}

/// The virtual clock of each rank, and its held memory.
class Simulation {
 public:
  Simulation(const Table& table, const std::vector<Costs>& costs)
      : table_(table), costs_(costs), positions_(table), ends_(positions_.numbers()) {
    timeline_.name = table.name;
    timeline_.spans.resize(table.actions.size());
    timeline_.live.resize(table.actions.size());
    timeline_.peak_live.resize(table.actions.size(), 0);
    for (int i = 0; i < table.micro_batches; ++i) goes_back_.push_back(positions_.goes_back(i));
  }

  Timeline run() {
    replay(table_, positions_, [this](const Action& action) { run_action(action); });
    for (const auto& spans : timeline_.spans) {
      if (!spans.empty()) timeline_.makespan = std::max(timeline_.makespan, spans.back().end);
    }
    for (const auto& spans : timeline_.spans) {
      Duration busy{0};
      for (const ActionSpan& span : spans) busy += span.end - span.start;
      timeline_.idle.push_back(timeline_.makespan - busy);
    }
    return std::move(timeline_);
  }

 private:
  const Costs& costs_of(int stage) const {
    return costs_.size() == 1 ? costs_.front() : costs_[static_cast<std::size_t>(stage)];
  }

  Duration cost_of(const Action& action) const {
    const Costs& costs = costs_of(action.stage);
    switch (action.kind) {
      case ActionKind::kForward:
        return costs.forward;
      case ActionKind::kInputGradient:
        return costs.input_gradient;
      case ActionKind::kWeightGradient:
        return costs.weight_gradient;
      case ActionKind::kBackward:
        break;
    }
    return costs.input_gradient + costs.weight_gradient;
  }

  void run_action(const Action& action) {
    const int rank = positions_.rank_of(action);
    auto& spans = timeline_.spans[static_cast<std::size_t>(rank)];
    Duration start = spans.empty() ? Duration::zero() : spans.back().end;
    for (const auto& need : positions_.needs(action)) {
      if (!need) continue;
      const bool hops = positions_.rank_of(*need) != rank;
      start = std::max(start, ends_[positions_.number(*need)] +
                                  (hops ? costs_of(need->stage).transfer : Duration::zero()));
    }
    const Duration end = start + cost_of(action);
    ends_[positions_.number(action)] = end;
    spans.push_back({action, start, end});
    keep(action, static_cast<std::size_t>(rank));
  }

  /// An activation is held from the start of its forward until the last action that reads it has ended.
  void keep(const Action& action, std::size_t rank) {
    auto& live = timeline_.live[rank];
    double held = live.empty() ? 0 : live.back();
    const double activation = costs_of(action.stage).activation;
    if (action.kind == ActionKind::kForward && goes_back_[static_cast<std::size_t>(action.micro_batch)]) {
      held += activation;
    } else if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kWeightGradient) {
      held -= activation;
    }
    live.push_back(held);
    timeline_.peak_live[rank] = std::max(timeline_.peak_live[rank], held);
  }

  const Table& table_;
  const std::vector<Costs>& costs_;
  const Positions positions_;
  std::vector<Duration> ends_;  ///< by number of the action
  std::vector<bool> goes_back_;
  Timeline timeline_;
};

}  // namespace

Timeline simulate(const Table& table, const std::vector<Costs>& costs) {
  check_costs(table, costs);
  return Simulation(table, costs).run();
}

}  // namespace torchspan::schedule
