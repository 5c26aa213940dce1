#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <optional>
#include <set>
#include <tuple>

#include <torchspan/core/error.h>

#include "schedule/greedy_order.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
/// Sums of shares such as 1/3 may exceed the limit by this share.
constexpr double kShareRounding = 1e-9;
/// Large tables get fewer settings, so that the search takes seconds.
constexpr std::int64_t kMostSimulatedActions = 5'000'000;

/// The most memory of one micro-batch on any rank, while a weight gradient has not run.
double memory_of_micro_batch(const Table& table, const std::vector<Costs>& costs) {
  std::vector<double> held(table.actions.size(), 0);
  for (std::size_t stage = 0; stage < table.rank_of_stage.size(); ++stage) {
    const Costs& cost = costs.size() == 1 ? costs.front() : costs[stage];
    held[static_cast<std::size_t>(table.rank_of_stage[stage])] +=
        std::max(cost.activation, cost.weight_input.value_or(0));
  }
  return *std::max_element(held.begin(), held.end());
}

/// Limits to try: the given one, and those of ZB-H1 and ZB-H2. Less memory is sometimes faster, because the
/// forwards that run ahead delay backwards.
std::set<double> limits_to_try(const Table& table, const std::vector<Costs>& costs, double limit) {
  std::set<double> limits = {limit};
  const double one = memory_of_micro_batch(table, costs);
  double repeated = 0;  // a forward at a time
  for (const Costs& cost : costs) repeated = std::max(repeated, cost.recomputation);
  const int ranks = table.ranks();
  for (const int kept : {ranks, ranks + ranks / 2, 2 * ranks - 1, 2 * ranks + 1}) {
    if (kept * one + repeated < limit) limits.insert(kept * one + repeated);
  }
  return limits;
}

/// All settings, those that win most often first.
std::vector<GreedyRules> rules_to_try() {
  std::vector<GreedyRules> all;
  for (const double least_gap : {0.0, 1.0, 0.5}) {
    for (const bool backward_first : {true, false}) {
      for (const double ahead : {1.0, 2.0, kUnlimited, 0.5, 2.0 / 3, 1.0 / 3, 1.5, 0.25}) {
        for (const bool late_stage_first : {true, false}) {
          all.push_back({backward_first, late_stage_first, least_gap, ahead});
        }
      }
    }
  }
  return all;
}

/// The known orders with split backwards for the same placement.
std::vector<Table> known_orders(const Table& empty) {
  const Shape one{.ranks = empty.ranks(), .micro_batches = empty.micro_batches};
  Shape several = one;
  several.stages_per_rank = empty.stages() / empty.ranks();
  std::vector<Table> orders;
  if (several.stages_per_rank * empty.ranks() != empty.stages()) return orders;
  if (empty.stages() == empty.ranks() && empty.rank_of_stage == looped(one).rank_of_stage) {
    orders = {zero_bubble_h1(one), zero_bubble_h2(one)};
  } else if (several.stages_per_rank == 2 && empty.rank_of_stage == v_shaped(several).rank_of_stage) {
    orders = {zero_bubble_v(several)};
  }
  for (Table& order : orders) order.name = empty.name;
  return orders;
}

/// The best order so far: the shortest step, then the shortest period, then the least memory.
class Best {
 public:
  Best(const std::vector<Costs>& costs, double limit) : costs_(costs), limit_(limit) {}

  void consider(Table table) {
    const Timeline timeline = simulate(table, costs_);
    const Merit merit{timeline.makespan, step_period(timeline),
                      *std::max_element(timeline.peak_live.begin(), timeline.peak_live.end())};
    if (std::get<double>(merit) > limit_ * (1 + kShareRounding) || (merit_ && merit >= *merit_)) return;
    merit_ = merit;
    table_ = std::move(table);
  }
  Table take() { return std::move(table_); }

 private:
  using Merit = std::tuple<Duration, Duration, double>;
  const std::vector<Costs>& costs_;
  const double limit_;
  std::optional<Merit> merit_;
  Table table_;
};

}  // namespace

Table zero_bubble(const Placement& placement, const std::vector<Costs>& costs, double memory_limit) {
  const int ranks = check(placement, "zero_bubble");
  check(costs, placement.rank_of_stage.size(), "zero_bubble");
  if (!(memory_limit > 0)) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("zero_bubble: memory_limit is {}; a rank needs room for one micro-batch", memory_limit));
  }
  const Table empty = empty_table("zero-bubble", placement, ranks);
  const std::set<double> limits = limits_to_try(empty, costs, memory_limit);
  const auto actions = 3 * static_cast<std::int64_t>(empty.stages()) * empty.micro_batches;
  std::int64_t budget = kMostSimulatedActions;
  Best best(costs, memory_limit);
  for (Table& order : known_orders(empty)) best.consider(std::move(order));
  for (const GreedyRules& rules : rules_to_try()) {
    for (const double limit : limits) {
      best.consider(GreedyOrder(empty, costs, limit, rules).run());
      budget -= actions;
    }
    if (budget < 0) break;
  }
  return best.take();
}

}  // namespace torchspan::schedule
