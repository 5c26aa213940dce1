#pragma once
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include <torchspan/schedule.h>

#include "schedule/memory_claims.h"

namespace torchspan::schedule {

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
  GreedyOrder(Table table, const std::vector<Costs>& costs, double memory_limit, const GreedyRules& rules);
  Table run();

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
  Duration cost_of(const Action& action) const;
  bool is_better(const Action& action, const Action& other) const;
  /// The best of the actions that have arrived at `now`, or arrivals.end().
  std::vector<Arrival>::iterator find_ready(std::size_t at, Duration now);
  bool is_admitted(const Action& forward) const;
  bool should_fill(const Rank& rank, Duration now) const;
  void wake(std::size_t at, Duration now);
  void start(std::size_t at, const Action& action, Duration now);
  void arrive(const Action& action, Duration when);
  void send_next(const Action& action, Duration end);

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

}  // namespace torchspan::schedule
