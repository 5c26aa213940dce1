#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "core/api/throw_invalid.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

constexpr std::size_t kActionKinds = 4;

[[noreturn]] void refuse(const Table& table, const std::string& text) {
  throw_invalid("schedule '{}': {}", table.name, text);
}

void check_frame(const Table& table) {
  if (table.micro_batches < 1) refuse(table, fmt::format("micro_batches is {}", table.micro_batches));
  if (table.rank_of_stage.empty()) refuse(table, "rank_of_stage is empty");
  for (std::size_t stage = 0; stage < table.rank_of_stage.size(); ++stage) {
    const int rank = table.rank_of_stage[stage];
    if (rank < 0 || rank >= table.ranks()) {
      refuse(table, fmt::format("rank_of_stage[{}] is {}; actions has {} ranks", stage, rank, table.ranks()));
    }
  }
  const auto cells = static_cast<std::int64_t>(table.rank_of_stage.size()) * table.micro_batches;
  if (cells > kMostCells) {
    refuse(table, fmt::format("{} stages times {} micro_batches are more than {} cells",
                              table.rank_of_stage.size(), table.micro_batches, kMostCells));
  }
}

void check_action(const Table& table, int rank, std::size_t place, const Action& action) {
  const std::string here = fmt::format("rank {}, action {} of its list: {}", rank, place, to_string(action));
  if (static_cast<std::size_t>(action.kind) >= kActionKinds) refuse(table, here + " has an unknown kind");
  if (action.stage < 0 || action.stage >= table.stages()) {
    refuse(table, fmt::format("{} is of stage {}; there are {} stages", here, action.stage, table.stages()));
  }
  if (action.micro_batch < 0 || action.micro_batch >= table.micro_batches) {
    refuse(table, fmt::format("{} is of micro-batch {}; there are {}", here, action.micro_batch,
                              table.micro_batches));
  }
  const int owner = table.rank_of_stage[static_cast<std::size_t>(action.stage)];
  if (owner != rank) {
    refuse(table, fmt::format("{} belongs to rank {}, which owns stage {}", here, owner, action.stage));
  }
}

/// Maps each action of a table to its position. The constructor checks that the table is complete: every action
/// once, on its rank.
class Positions {
 public:
  /// Throws Error{kInvalid} as validate() does, except for deadlocks. The table must outlive this object.
  explicit Positions(const Table& table) : table_(table) {
    check_frame(table);
    place_.assign(kActionKinds * table.rank_of_stage.size() * static_cast<std::size_t>(table.micro_batches),
                  -1);
    place_all();
    for (int micro_batch = 0; micro_batch < table.micro_batches; ++micro_batch) {
      const bool back = goes_back(micro_batch);
      for (int stage = 0; stage < table.stages(); ++stage) check_complete(stage, micro_batch, back);
    }
  }

  /// Whether the table has the action.
  bool has(const Action& action) const { return place_[number(action)] >= 0; }
  /// The action's position among its rank's actions.
  std::size_t place(const Action& action) const { return static_cast<std::size_t>(place_[number(action)]); }
  int rank_of(const Action& action) const {
    return table_.rank_of_stage[static_cast<std::size_t>(action.stage)];
  }

  /// Whether the micro-batch has backwards (in a checked table: at all stages or at none).
  bool goes_back(int micro_batch) const {
    for (int stage = 0; stage < table_.stages(); ++stage) {
      for (const auto kind :
           {ActionKind::kBackward, ActionKind::kInputGradient, ActionKind::kWeightGradient}) {
        if (has({kind, stage, micro_batch})) return true;
      }
    }
    return false;
  }

  /// The actions that must end before `action` starts: at most two.
  std::array<std::optional<Action>, 2> needs(const Action& action) const {
    const auto [kind, stage, i] = action;
    if (kind == ActionKind::kForward) {
      if (stage == 0) return {};
      return {Action{kind, stage - 1, i}, std::nullopt};
    }
    if (kind == ActionKind::kWeightGradient)
      return {Action{ActionKind::kInputGradient, stage, i}, std::nullopt};
    const Action forward{ActionKind::kForward, stage, i};
    if (stage + 1 == table_.stages()) return {forward, std::nullopt};
    const Action whole{ActionKind::kBackward, stage + 1, i};
    return {forward, has(whole) ? whole : Action{ActionKind::kInputGradient, stage + 1, i}};
  }

  /// A number for each possible action, below numbers().
  std::size_t number(const Action& action) const {
    const auto row = static_cast<std::size_t>(action.kind) * table_.rank_of_stage.size() +
                     static_cast<std::size_t>(action.stage);
    return row * static_cast<std::size_t>(table_.micro_batches) +
           static_cast<std::size_t>(action.micro_batch);
  }

  std::size_t numbers() const { return place_.size(); }

 private:
  void place_all() {
    for (int rank = 0; rank < table_.ranks(); ++rank) {
      const auto& actions = table_.actions[static_cast<std::size_t>(rank)];
      for (std::size_t place = 0; place < actions.size(); ++place) {
        check_action(table_, rank, place, actions[place]);
        auto& known = place_[number(actions[place])];
        if (known >= 0) {
          refuse(table_, fmt::format("rank {} runs {} twice: actions {} and {} of its list", rank,
                                     to_string(actions[place]), known, place));
        }
        known = static_cast<std::ptrdiff_t>(place);
      }
    }
  }

  void check_complete(int stage, int micro_batch, bool back) const {
    const auto name = [&](ActionKind kind) { return to_string({kind, stage, micro_batch}); };
    const auto is_there = [&](ActionKind kind) { return has({kind, stage, micro_batch}); };
    const int rank = table_.rank_of_stage[static_cast<std::size_t>(stage)];
    if (!is_there(ActionKind::kForward)) {
      refuse(table_, fmt::format("rank {} never runs {}", rank, name(ActionKind::kForward)));
    }
    const bool whole = is_there(ActionKind::kBackward);
    const bool input = is_there(ActionKind::kInputGradient);
    const bool weight = is_there(ActionKind::kWeightGradient);
    if (whole && (input || weight)) {
      const auto half = input ? ActionKind::kInputGradient : ActionKind::kWeightGradient;
      refuse(table_, fmt::format("rank {} runs {} and also its part {}", rank, name(ActionKind::kBackward),
                                 name(half)));
    }
    if (input != weight) {
      const auto here = input ? ActionKind::kInputGradient : ActionKind::kWeightGradient;
      const auto other = input ? ActionKind::kWeightGradient : ActionKind::kInputGradient;
      refuse(table_, fmt::format("rank {} runs {} but never {}", rank, name(here), name(other)));
    }
    if (back && !whole && !input) {
      refuse(table_,
             fmt::format("rank {} never runs {}, although micro-batch {} has backwards at other stages", rank,
                         name(ActionKind::kBackward), micro_batch));
    }
  }

  const Table& table_;
  std::vector<std::ptrdiff_t> place_;
};

/// Describes which ranks wait for each other when no rank can continue. `next` holds each rank's next action.
class Deadlock {
 public:
  Deadlock(const Table& table, const Positions& positions, const std::vector<std::size_t>& next)
      : table_(table), positions_(positions), next_(next) {}

  std::string text() const {
    const std::vector<int> ring = find_ring();
    std::string text = ring.size() == 1 ? "a rank waits for itself" : "ranks wait for each other in a cycle";
    for (int rank : ring) {
      const Action mine = head(rank);
      const Action other = missing(mine);
      const int owner = positions_.rank_of(other);
      text += fmt::format("; rank {} at {} (action {} of its list) waits for {} ", rank, to_string(mine),
                          positions_.place(mine), to_string(other));
      text += owner == rank ? std::string("of the same rank") : fmt::format("of rank {}", owner);
      const Action theirs = head(owner);
      text += other == theirs ? ", which is that rank's next action"
                              : fmt::format(", which comes after {}", to_string(theirs));
    }
    return text;
  }

 private:
  const std::vector<Action>& actions(int rank) const {
    return table_.actions[static_cast<std::size_t>(rank)];
  }
  std::size_t next(int rank) const { return next_[static_cast<std::size_t>(rank)]; }
  const Action& head(int rank) const { return actions(rank)[next(rank)]; }
  bool is_done(const Action& action) const {
    return positions_.place(action) < next(positions_.rank_of(action));
  }
  Action missing(const Action& action) const {
    const auto needs = positions_.needs(action);
    return needs[0] && !is_done(*needs[0]) ? *needs[0] : needs[1].value();
  }

  /// Every waiting rank waits for another waiting rank, so following them ends in a cycle.
  std::vector<int> find_ring() const {
    int rank = 0;
    while (next(rank) == actions(rank).size()) ++rank;
    std::vector<int> path;
    while (std::find(path.begin(), path.end(), rank) == path.end()) {
      path.push_back(rank);
      rank = positions_.rank_of(missing(head(rank)));
    }
    return {std::find(path.begin(), path.end(), rank), path.end()};
  }

  const Table& table_;
  const Positions& positions_;
  const std::vector<std::size_t>& next_;
};

/// Calls `run` for each action, after everything it needs and in the order of its rank. Throws Error{kInvalid}
/// with the cycle of ranks that wait for each other if no such order exists.
void replay(const Table& table, const Positions& positions, const std::function<void(const Action&)>& run) {
  std::vector<std::size_t> next(table.actions.size(), 0);
  const auto is_ready = [&](const Action& action) {
    for (const auto& need : positions.needs(action)) {
      if (need && positions.place(*need) >= next[static_cast<std::size_t>(positions.rank_of(*need))])
        return false;
    }
    return true;
  };
  std::vector<int> to_try;
  for (int rank = table.ranks() - 1; rank >= 0; --rank) to_try.push_back(rank);
  while (!to_try.empty()) {
    const auto rank = static_cast<std::size_t>(to_try.back());
    to_try.pop_back();
    const auto& actions = table.actions[rank];
    while (next[rank] < actions.size() && is_ready(actions[next[rank]])) {
      const Action& action = actions[next[rank]++];
      run(action);
      // Only the neighbor in the model can have waited for it.
      const int neighbor = action.kind == ActionKind::kForward ? action.stage + 1 : action.stage - 1;
      if (neighbor >= 0 && neighbor < table.stages()) {
        to_try.push_back(table.rank_of_stage[static_cast<std::size_t>(neighbor)]);
      }
    }
  }
  for (std::size_t rank = 0; rank < next.size(); ++rank) {
    if (next[rank] < table.actions[rank].size()) refuse(table, Deadlock(table, positions, next).text());
  }
}

}  // namespace

void validate(const Table& table) {
  replay(table, Positions(table), [](const Action&) {});
}

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

namespace {

/// Zero for actions that never ran.
struct Mean {
  Duration sum{0};
  int count = 0;
  Duration value() const { return count == 0 ? Duration{0} : sum / count; }
};

}  // namespace

std::vector<Costs> mean_costs(const Timeline& measured, int stages) {
  std::map<std::pair<int, ActionKind>, Mean> means;
  for (const auto& spans : measured.spans) {
    for (const ActionSpan& span : spans) {
      Mean& mean = means[{span.action.stage, span.action.kind}];
      mean.sum += span.end - span.start;
      ++mean.count;
    }
  }
  std::vector<Costs> costs;
  for (int stage = 0; stage < stages; ++stage) {
    const auto mean = [&](ActionKind kind) { return means[{stage, kind}].value(); };
    // Some schedules split only some backwards of a stage; the split ones have both costs.
    const bool split = means.contains({stage, ActionKind::kInputGradient});
    costs.push_back({.forward = mean(ActionKind::kForward),
                     .input_gradient = mean(split ? ActionKind::kInputGradient : ActionKind::kBackward),
                     .weight_gradient = mean(ActionKind::kWeightGradient)});
  }
  return costs;
}

}  // namespace torchspan::schedule
