#pragma once
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::schedule {

/// Appends the actions of one rank to a table. Each call takes the next micro-batch of its stage and kind;
/// micro-batches beyond the table's are counted, but left out.
class Sequence {
 public:
  Sequence(Table& table, int rank)
      : actions_(table.actions[static_cast<std::size_t>(rank)]), micro_batches_(table.micro_batches) {}

  void forward(int stage) { add(ActionKind::kForward, stage); }
  void backward(int stage);
  /// Its weight gradient becomes pending.
  void input_gradient(int stage);
  /// Runs the pending weight gradient whose input gradient came first, of any stage; none if there is none.
  void oldest_weight_gradient();
  /// Runs the oldest pending weight gradient of a stage.
  void weight_gradient(int stage);

  int forwards(int stage) const { return count(ActionKind::kForward, stage); }
  std::size_t pending() const { return pending_.size(); }

 private:
  void add(ActionKind kind, int stage) { add({kind, stage, counts_[{kind, stage}]++}); }
  void add(const Action& action) {
    if (action.micro_batch < micro_batches_) actions_.push_back(action);
  }
  int count(ActionKind kind, int stage) const;

  std::vector<Action>& actions_;
  const int micro_batches_;
  std::map<std::pair<ActionKind, int>, int> counts_;
  std::deque<Action> pending_;
};

}  // namespace torchspan::schedule
