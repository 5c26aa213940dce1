#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "core/api/throw_invalid.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

/// The memory of each rank while an order is built. Admits a forward only if all micro-batches can still
/// finish one after another within the limit (the banker's algorithm), so that memory cannot deadlock.
class MemoryClaims {
 public:
  /// Throws Error{kInvalid} if a rank has no room for one micro-batch.
  MemoryClaims(const Table& table, const std::vector<Costs>& costs, double limit)
      : rank_of_stage_(table.rank_of_stage),
        costs_(costs),
        is_limited_(std::isfinite(limit)),
        ranks_(table.actions.size()) {
    if (!is_limited_) return;
    rounding_ = 1e-9 * limit;
    std::vector<Claim> whole(ranks_.size());
    std::vector<double> repeated(ranks_.size(), 0);  // one forward at a time
    for (int stage = 0; stage < table.stages(); ++stage) {
      whole[rank_of(stage)].missing += most(costs_of(stage));
      ++whole[rank_of(stage)].unfinished;
      repeated[rank_of(stage)] = std::max(repeated[rank_of(stage)], costs_of(stage).recomputation);
    }
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const double needed = whole[rank].missing + repeated[rank];
      if (needed > limit + rounding_) {
        throw_invalid(
            "zero_bubble: memory_limit is {}; one micro-batch needs {} on rank {}. Raise the limit, or use "
            "more micro-batches",
            limit, needed, rank);
      }
      ranks_[rank].free = limit - repeated[rank];
      ranks_[rank].claims.assign(static_cast<std::size_t>(table.micro_batches), whole[rank]);
    }
  }

  bool admits(const Action& forward) const {
    if (!is_limited_) return true;
    const Rank& rank = ranks_[rank_of(forward.stage)];
    const double size = most(costs_of(forward.stage));
    const auto mine = static_cast<std::size_t>(forward.micro_batch);
    double free = rank.free - size;
    if (free < -rounding_) return false;
    for (std::size_t i = rank.oldest; i < rank.claims.size(); ++i) {
      const Claim& claim = rank.claims[i];
      const double missing = claim.missing - (i == mine ? size : 0);
      if (missing > free + rounding_) return false;
      free += claim.held + (i == mine ? size : 0);
      // Forwards start in order, so micro-batches from here on are not in memory and find the whole limit free.
      if (i > mine && claim.held == 0) break;
    }
    return true;
  }

  void start(const Action& action) {
    if (!is_limited_) return;
    Rank& rank = ranks_[rank_of(action.stage)];
    Claim& claim = rank.claims[static_cast<std::size_t>(action.micro_batch)];
    const Costs& costs = costs_of(action.stage);
    const auto grow = [&](double by) {
      claim.held += by;
      rank.free -= by;
    };
    switch (action.kind) {
      case ActionKind::kForward:
        claim.missing -= most(costs);
        grow(most(costs));
        break;
      case ActionKind::kInputGradient:
        grow(weight_input(costs) - most(costs));
        break;
      case ActionKind::kWeightGradient:
        grow(-weight_input(costs));
        --claim.unfinished;
        break;
      case ActionKind::kBackward:
        grow(-most(costs));
        --claim.unfinished;
        break;
    }
    while (rank.oldest < rank.claims.size() && rank.claims[rank.oldest].unfinished == 0) ++rank.oldest;
  }

 private:
  struct Claim {
    double held = 0;  ///< by one micro-batch on one rank
    double missing = 0;
    int unfinished = 0;  ///< stages of the rank whose backward has not run
  };
  struct Rank {
    double free = 0;
    std::vector<Claim> claims;  ///< by micro-batch
    std::size_t oldest = 0;     ///< the first unfinished micro-batch
  };

  const Costs& costs_of(int stage) const {
    return costs_.size() == 1 ? costs_.front() : costs_[static_cast<std::size_t>(stage)];
  }
  /// The most memory of a micro-batch at a stage.
  static double most(const Costs& costs) { return std::max(costs.activation, weight_input(costs)); }
  static double weight_input(const Costs& costs) { return costs.weight_input.value_or(costs.activation); }
  std::size_t rank_of(int stage) const {
    return static_cast<std::size_t>(rank_of_stage_[static_cast<std::size_t>(stage)]);
  }

  std::vector<int> rank_of_stage_;
  const std::vector<Costs>& costs_;
  bool is_limited_;
  double rounding_ = 0;  ///< sums of shares such as 1/3 may exceed the limit by this much
  std::vector<Rank> ranks_;
};

/// The choices that a greedy order leaves open.
struct GreedyRules {
  bool backward_first = true;    ///< of a ready input gradient and a ready forward
  bool late_stage_first = true;  ///< of two ready forwards of a rank
  double least_gap = 0;          ///< a weight gradient fills a gap of at least this share of its length
  /// Stage s keeps at most 1 + ahead · (stages − 1 − s) micro-batches before their input gradients (1F1B: 1).
  double ahead = std::numeric_limits<double>::infinity();
};

/// Simulates a pipeline in which each free rank starts the best action that is ready: an input gradient, a
/// forward that memory permits, or a weight gradient if the rank would otherwise wait. Records what each rank
/// ran; a recorded order cannot deadlock, since it was executed.
class GreedyOrder {
 public:
  GreedyOrder(Table table, const std::vector<Costs>& costs, double memory_limit, const GreedyRules& rules)
      : table_(std::move(table)),
        costs_(costs),
        rules_(rules),
        memory_(table_, costs, memory_limit),
        ranks_(table_.actions.size()),
        alive_(table_.rank_of_stage.size(), 0) {}

  Table run() {
    arrive({ActionKind::kForward, 0, 0}, Duration::zero());
    while (!wakes_.empty()) {
      const auto [now, rank] = wakes_.top();
      wakes_.pop();
      if (ranks_[rank].free_at <= now) wake(rank, now);
    }
    return std::move(table_);
  }

 private:
  /// An action whose inputs are at the rank from `when` on.
  struct Arrival {
    Duration when{0};
    Action action;
  };
  struct Rank {
    Duration free_at{0};
    std::vector<Arrival> arrivals;  ///< forwards and input gradients that have not started
    std::queue<Action> pending;     ///< weight gradients
  };

  const Costs& costs_of(int stage) const {
    return costs_.size() == 1 ? costs_.front() : costs_[static_cast<std::size_t>(stage)];
  }
  std::size_t rank_of(int stage) const {
    return static_cast<std::size_t>(table_.rank_of_stage[static_cast<std::size_t>(stage)]);
  }

  Duration cost_of(const Action& action) const {
    const Costs& costs = costs_of(action.stage);
    if (action.kind == ActionKind::kForward) return costs.forward;
    return action.kind == ActionKind::kInputGradient ? costs.input_gradient : costs.weight_gradient;
  }

  bool is_better(const Action& action, const Action& other) const {
    const bool forward = action.kind == ActionKind::kForward;
    if (action.kind != other.kind) return forward != rules_.backward_first;
    if (!forward)
      return std::tie(action.micro_batch, other.stage) < std::tie(other.micro_batch, action.stage);
    if (action.stage != other.stage) return (action.stage > other.stage) == rules_.late_stage_first;
    return action.micro_batch < other.micro_batch;
  }

  /// The best of the actions that have arrived at `now`, or arrivals.end().
  std::vector<Arrival>::iterator find_ready(std::size_t at, Duration now) {
    auto& arrivals = ranks_[at].arrivals;
    auto best = arrivals.end();
    for (auto one = arrivals.begin(); one != arrivals.end(); ++one) {
      if (one->when > now || (best != arrivals.end() && !is_better(one->action, best->action))) continue;
      if (one->action.kind == ActionKind::kForward && !is_admitted(one->action)) continue;
      best = one;
    }
    return best;
  }

  bool is_admitted(const Action& forward) const {
    const int alive = alive_[static_cast<std::size_t>(forward.stage)];
    const int following = table_.stages() - 1 - forward.stage;
    if (alive >= 1 + (following == 0 ? 0 : rules_.ahead * following)) return false;
    return memory_.admits(forward);
  }

  bool should_fill(const Rank& rank, Duration now) const {
    if (rank.pending.empty()) return false;
    std::optional<Duration> gap;
    for (const Arrival& arrival : rank.arrivals) {
      if (arrival.when > now && (!gap || arrival.when - now < *gap)) gap = arrival.when - now;
    }
    const auto length = static_cast<double>(cost_of(rank.pending.front()).count());
    return !gap || static_cast<double>(gap->count()) >= rules_.least_gap * length;
  }

  void wake(std::size_t at, Duration now) {
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

  void start(std::size_t at, const Action& action, Duration now) {
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

  void arrive(const Action& action, Duration when) {
    const std::size_t rank = rank_of(action.stage);
    ranks_[rank].arrivals.push_back({when, action});
    wakes_.emplace(when, rank);
  }

  void send_next(const Action& action, Duration end) {
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

  Table table_;
  const std::vector<Costs>& costs_;
  const GreedyRules rules_;
  MemoryClaims memory_;
  std::vector<Rank> ranks_;
  std::vector<int> alive_;  ///< by stage: micro-batches between forward and input gradient
  std::priority_queue<std::pair<Duration, std::size_t>, std::vector<std::pair<Duration, std::size_t>>,
                      std::greater<>>
      wakes_;  ///< when a rank may have something to start
};

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
    throw_invalid("zero_bubble: memory_limit is {}; a rank needs room for one micro-batch", memory_limit);
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
