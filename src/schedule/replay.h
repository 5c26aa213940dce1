#pragma once
#include <array>
#include <functional>
#include <optional>
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::schedule {

/// Maps each action of a table to its position. The constructor checks that the table is complete: every action
/// once, on its rank.
class Positions {
 public:
  /// Throws Error{kInvalid} as validate() does, except for deadlocks. The table must outlive this object.
  explicit Positions(const Table& table);

  /// Whether the table has the action.
  bool has(const Action& action) const { return place_[number(action)] >= 0; }
  /// The action's position among its rank's actions.
  std::size_t place(const Action& action) const { return static_cast<std::size_t>(place_[number(action)]); }
  int rank_of(const Action& action) const {
    return table_.rank_of_stage[static_cast<std::size_t>(action.stage)];
  }

  /// Whether the micro-batch has backwards (in a checked table: at all stages or at none).
  bool goes_back(int micro_batch) const;
  /// The actions that must end before `action` starts: at most two.
  std::array<std::optional<Action>, 2> needs(const Action& action) const;
  /// A number for each possible action, below numbers().
  std::size_t number(const Action& action) const;
  std::size_t numbers() const { return place_.size(); }

 private:
  void place_all();
  void check_complete(int stage, int micro_batch, bool goes_back) const;

  const Table& table_;
  std::vector<std::ptrdiff_t> place_;
};

/// Calls `run` for each action, after everything it needs and in the order of its rank. Throws Error{kInvalid}
/// with the cycle of ranks that wait for each other if no such order exists.
void replay(const Table& table, const Positions& positions, const std::function<void(const Action&)>& run);

}  // namespace torchspan::schedule
