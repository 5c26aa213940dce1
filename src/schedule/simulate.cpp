#include <algorithm>

#include "schedule/replay.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

/// The virtual clock of each rank, and its held memory.
class Simulation {
 public:
  Simulation(const Table& table, const std::vector<Costs>& costs)
      : table_(table), costs_(costs), positions_(table), ends_(positions_.numbers()) {
    timeline_.name = table.name;
    timeline_.spans.resize(table.actions.size());
    timeline_.live.resize(table.actions.size());
    timeline_.peak_live.resize(table.actions.size(), 0);
    timeline_.weight_inputs.resize(table.actions.size());
    timeline_.peak_weight_inputs.resize(table.actions.size(), 0);
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

  /// An activation is held from the start of its forward to the end of its input gradient, and what its
  /// weight gradient reads until that has ended.
  void keep(const Action& action, std::size_t rank) {
    auto& live = timeline_.live[rank];
    auto& weight_inputs = timeline_.weight_inputs[rank];
    double held = live.empty() ? 0 : live.back();
    double waiting = weight_inputs.empty() ? 0 : weight_inputs.back();
    const Costs& costs = costs_of(action.stage);
    const double weight_input = costs.weight_input.value_or(costs.activation);
    // A stage without input gradients, such as the first, repeats its forward for the weight gradients.
    const bool late = costs.input_gradient == Duration::zero();
    const bool repeats = action.kind == ActionKind::kBackward ||
                         action.kind == (late ? ActionKind::kWeightGradient : ActionKind::kInputGradient);
    if (repeats) timeline_.peak_live[rank] = std::max(timeline_.peak_live[rank], held + costs.recomputation);
    switch (action.kind) {
      case ActionKind::kForward:
        if (goes_back_[static_cast<std::size_t>(action.micro_batch)]) held += costs.activation;
        break;
      case ActionKind::kBackward:
        held -= costs.activation;
        break;
      case ActionKind::kInputGradient:
        held += weight_input - costs.activation;
        waiting += weight_input;
        break;
      case ActionKind::kWeightGradient:
        held -= weight_input;
        waiting -= weight_input;
        break;
    }
    live.push_back(held);
    weight_inputs.push_back(waiting);
    timeline_.peak_live[rank] = std::max(timeline_.peak_live[rank], held);
    timeline_.peak_weight_inputs[rank] = std::max(timeline_.peak_weight_inputs[rank], waiting);
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
  check(costs, table.rank_of_stage.size(), "simulate");
  return Simulation(table, costs).run();
}

double idle_share(const Timeline& timeline) {
  double idle = 0;
  for (const Duration each : timeline.idle) idle += static_cast<double>(each.count());
  const double all =
      static_cast<double>(timeline.makespan.count()) * static_cast<double>(timeline.idle.size());
  return all > 0 ? idle / all : 0;
}

Duration step_period(const Timeline& timeline) {
  Duration longest{0};
  for (const auto& spans : timeline.spans) {
    if (!spans.empty()) longest = std::max(longest, spans.back().end - spans.front().start);
  }
  return longest;
}

double bubble_share(const Timeline& timeline) {
  Duration busy{0};
  for (const auto& spans : timeline.spans) {
    for (const ActionSpan& span : spans) busy += span.end - span.start;
  }
  const double all =
      static_cast<double>(step_period(timeline).count()) * static_cast<double>(timeline.spans.size());
  return all > 0 ? 1 - static_cast<double>(busy.count()) / all : 0;
}

}  // namespace torchspan::schedule
