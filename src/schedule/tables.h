#pragma once
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/schedule.h>

/// Functions that the schedules share.
namespace torchspan::schedule {

/// The letter of a kind: F, B, I, W.
char letter(ActionKind kind);

/// The most cells of one kind (stages times micro-batches) in a table.
inline constexpr std::int64_t kMostCells = std::int64_t{1} << 22;

/// Throws Error{kInvalid} that names the field of the shape that is too small, or reports that the table is
/// too large.
void check(const Shape& shape, const std::string& schedule);
/// The same for a placement; also names a stage whose rank is out of range. Returns the number of ranks.
int check(const Placement& placement, const std::string& schedule);
/// Refuses any other number of stages per rank than `expected`; `instead` ends the message.
void check_stages_per_rank(const Shape& shape, const std::string& schedule, int expected,
                           const std::string& instead = "");
/// Throws Error{kInvalid} unless there is one entry for all stages or one for each, none negative.
void check(const std::vector<Costs>& costs, std::size_t stages, const std::string& function);

/// A table without actions for a checked placement.
Table empty_table(std::string name, const Placement& placement, int ranks);

/// Appends each rank's forwards in the order of s + i, the step at which stage s would run micro-batch i if
/// every stage had a separate rank. If two stages of a rank are due in the same step, the later stage comes
/// first, which sends results on. Such an order cannot deadlock: an action waits only for actions with a smaller s
/// + i.
void append_forwards(Table& table);

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
