#include <algorithm>
#include <queue>
#include <set>
#include <tuple>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "schedule/tables.h"

namespace torchspan::schedule {

Table forward_only(const Placement& placement) {
  const int ranks = check(placement, "forward_only");
  Table table = empty_table("forward-only", placement, ranks);
  append_forwards(table);
  return table;
}

Table gpipe(const Placement& placement) {
  const int ranks = check(placement, "gpipe");
  Table table = empty_table("gpipe", placement, ranks);
  append_forwards(table);
  // Backwards mirror the forwards: what was last is ready first.
  for (auto& actions : table.actions) {
    for (std::size_t left = actions.size(); left > 0; --left) {
      const Action forward = actions[left - 1];
      actions.push_back({ActionKind::kBackward, forward.stage, forward.micro_batch});
    }
  }
  return table;
}

namespace {

/// Simulates a placement in unit costs (forward 1, backward 2), with each rank running the best ready action,
/// and records what each rank ran. A recorded order cannot deadlock, since it was executed.
class ListScheduler {
 public:
  ListScheduler(const Placement& placement, int ranks, int max_in_flight)
      : table_(empty_table("1f1b", placement, ranks)),
        most_(max_in_flight),
        ready_(static_cast<std::size_t>(ranks)),
        busy_(static_cast<std::size_t>(ranks), false),
        alive_(placement.rank_of_stage.size(), 0) {}

  Table run() {
    make_ready({ActionKind::kForward, 0, 0});
    start(rank_of(0), 0);
    while (!running_.empty()) {
      const int now = std::get<0>(running_.top());
      std::set<int> touched;
      while (!running_.empty() && std::get<0>(running_.top()) == now) {
        const Action action = std::get<1>(running_.top());
        running_.pop();
        finish(action, touched);
      }
      for (int rank : touched) start(rank, now);
    }
    return std::move(table_);
  }

 private:
  /// Orders backwards first, then the oldest micro-batch, then the earliest stage.
  struct Better {
    bool operator()(const Action& a, const Action& b) const { return key(a) < key(b); }
    static std::tuple<bool, int, int> key(const Action& action) {
      return {action.kind == ActionKind::kForward, action.micro_batch, action.stage};
    }
  };
  struct Later {
    bool operator()(const std::tuple<int, Action>& a, const std::tuple<int, Action>& b) const {
      return a > b;
    }
  };

  int rank_of(int stage) const { return table_.rank_of_stage[static_cast<std::size_t>(stage)]; }
  int& alive(int stage) { return alive_[static_cast<std::size_t>(stage)]; }
  void make_ready(const Action& action) {
    ready_[static_cast<std::size_t>(rank_of(action.stage))].insert(action);
  }

  /// Returns how many micro-batches may be between their forward and their backward at a stage. Stages nearer
  /// to the end get their backwards sooner and need fewer. Micro-batches beyond a stage can always proceed,
  /// so a limit of 1 or more never stops all ranks.
  int limit(int stage) const { return std::min(most_, std::max(most_, table_.stages()) - stage); }

  void start(int rank, int now) {
    const auto at = static_cast<std::size_t>(rank);
    if (busy_[at]) return;
    const auto best = std::find_if(ready_[at].begin(), ready_[at].end(), [&](const Action& action) {
      return action.kind == ActionKind::kBackward || alive(action.stage) < limit(action.stage);
    });
    if (best == ready_[at].end()) return;
    const Action action = *best;
    ready_[at].erase(best);
    busy_[at] = true;
    table_.actions[at].push_back(action);
    const bool forward = action.kind == ActionKind::kForward;
    if (forward) ++alive(action.stage);
    if (forward && action.stage == 0 && action.micro_batch + 1 < table_.micro_batches) {
      make_ready({ActionKind::kForward, 0, action.micro_batch + 1});
    }
    running_.emplace(now + (forward ? 1 : 2), action);
  }

  void finish(const Action& action, std::set<int>& touched) {
    busy_[static_cast<std::size_t>(rank_of(action.stage))] = false;
    touched.insert(rank_of(action.stage));
    Action next = action;
    if (action.kind == ActionKind::kForward && action.stage + 1 < table_.stages()) {
      ++next.stage;
    } else if (action.kind == ActionKind::kForward) {
      next.kind = ActionKind::kBackward;
    } else {
      --alive(action.stage);
      if (--next.stage < 0) return;
    }
    make_ready(next);
    touched.insert(rank_of(next.stage));
  }

  Table table_;
  const int most_;
  std::vector<std::set<Action, Better>> ready_;  ///< by rank
  std::vector<bool> busy_;                       ///< by rank
  std::vector<int> alive_;                       ///< by stage: micro-batches between forward and backward
  std::priority_queue<std::tuple<int, Action>, std::vector<std::tuple<int, Action>>, Later> running_;
};

}  // namespace

Table one_forward_one_backward(Shape shape) {
  check(shape, "one_forward_one_backward");
  check_stages_per_rank(shape, "one_forward_one_backward", 1,
                        ". Use interleaved() or a Placement for several");
  Table table = empty_table("1f1b", looped(shape), shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const int warm_up = std::min(shape.micro_batches, shape.ranks - 1 - rank);
    auto& actions = table.actions[static_cast<std::size_t>(rank)];
    for (int i = 0; i < shape.micro_batches + warm_up; ++i) {
      if (i < shape.micro_batches) actions.push_back({ActionKind::kForward, rank, i});
      if (i >= warm_up) actions.push_back({ActionKind::kBackward, rank, i - warm_up});
    }
  }
  return table;
}

Table one_forward_one_backward(const Placement& placement, int max_in_flight) {
  const int ranks = check(placement, "one_forward_one_backward");
  if (max_in_flight < 0) {
    throw_invalid("one_forward_one_backward: max_in_flight is {}; 0 stands for the number of ranks",
                  max_in_flight);
  }
  return ListScheduler(placement, ranks, max_in_flight == 0 ? ranks : max_in_flight).run();
}

namespace {

/// Numbers a rank's actions of one direction: `group` micro-batches pass its first stage, then its second, and
/// so on through all stages; then the next `group` micro-batches follow. Backwards take the stages in
/// reverse.
Action numbered(ActionKind kind, int rank, const Shape& shape, int number) {
  const int group = std::min(shape.ranks, shape.micro_batches);
  const int round = group * shape.stages_per_rank;
  const int forward_chunk = number % round / group;
  const int chunk = kind == ActionKind::kForward ? forward_chunk : shape.stages_per_rank - 1 - forward_chunk;
  return {kind, chunk * shape.ranks + rank, number / round * group + number % group};
}

void check_interleaved(const Shape& shape) {
  check(shape, "interleaved");
  if (shape.micro_batches > shape.ranks && shape.micro_batches % shape.ranks != 0) {
    const int below = shape.micro_batches / shape.ranks * shape.ranks;
    throw_invalid("interleaved: micro_batches is {}, which is not a multiple of the {} ranks; use {} or {}",
                  shape.micro_batches, shape.ranks, below, below + shape.ranks);
  }
}

}  // namespace

Table interleaved(Shape shape) {
  check_interleaved(shape);
  Table table = empty_table("interleaved", looped(shape), shape.ranks);
  const int group = std::min(shape.ranks, shape.micro_batches);
  const int all = shape.micro_batches * shape.stages_per_rank;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    // With several stages per rank, a micro-batch returns after `ranks` steps, not at once: a rank runs twice
    // as many forwards ahead as with one stage.
    const int hops = shape.ranks - 1 - rank;
    const int ahead = shape.stages_per_rank == 1 ? hops : 2 * hops + (shape.stages_per_rank - 1) * group;
    const int warm_up = std::min(all, ahead);
    auto& actions = table.actions[static_cast<std::size_t>(rank)];
    for (int number = 0; number < all + warm_up; ++number) {
      if (number < all) actions.push_back(numbered(ActionKind::kForward, rank, shape, number));
      if (number >= warm_up)
        actions.push_back(numbered(ActionKind::kBackward, rank, shape, number - warm_up));
    }
  }
  return table;
}

Table looped_breadth_first(Shape shape) {
  check(shape, "looped_breadth_first");
  Table table = empty_table("bfs", looped(shape), shape.ranks);
  const int stages = table.stages();
  for (int stage = 0; stage < stages; ++stage) {
    auto& actions = table.actions[static_cast<std::size_t>(stage % shape.ranks)];
    for (int i = 0; i < shape.micro_batches; ++i) actions.push_back({ActionKind::kForward, stage, i});
  }
  for (int stage = stages - 1; stage >= 0; --stage) {
    auto& actions = table.actions[static_cast<std::size_t>(stage % shape.ranks)];
    for (int i = shape.micro_batches - 1; i >= 0; --i) actions.push_back({ActionKind::kBackward, stage, i});
  }
  return table;
}

}  // namespace torchspan::schedule
