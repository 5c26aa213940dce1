#include "pipeline/policies/policy.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {
namespace {

using schedule::Action;
using schedule::ActionKind;

class TablePolicy final : public Policy {
 public:
  TablePolicy(std::vector<Action> row, bool two_parts) : row_(std::move(row)), end_(row_.size()) {
    if (!two_parts) return;
    const auto forwards = std::stable_partition(
        row_.begin(), row_.end(), [](const Action& action) { return action.kind == ActionKind::kForward; });
    end_ = static_cast<std::size_t>(forwards - row_.begin());
  }

  void became_ready(Action action) override {
    if (action.kind == ActionKind::kBackward) {
      const Action part{ActionKind::kInputGradient, action.stage, action.micro_batch};
      if (std::find(row_.begin(), row_.end(), part) != row_.end()) action = part;
    }
    ready_.insert(action);
  }
  std::optional<Action> next() override {
    if (cursor_ == end_ || ready_.erase(row_[cursor_]) == 0) return std::nullopt;
    return row_[cursor_++];
  }
  std::optional<Action> next_within(int live) override {
    const bool forward = cursor_ < end_ && row_[cursor_].kind == ActionKind::kForward;
    return forward && live >= most_live() ? std::nullopt : next();
  }
  std::optional<Action> next_backward() const override {
    const auto end = row_.begin() + static_cast<std::ptrdiff_t>(end_);
    const auto found =
        std::find_if(row_.begin() + static_cast<std::ptrdiff_t>(cursor_), end, [](const Action& action) {
          return action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGradient;
        });
    return found == end ? std::nullopt : std::optional<Action>(*found);
  }
  bool any_left() const override { return cursor_ < end_; }
  void begin_backwards() override { end_ = row_.size(); }

 private:
  /// Most passes that the worker holds at once if it follows the table.
  int most_live() const {
    int live = 0, most = 0;
    for (const Action& action : row_) {
      if (action.kind == ActionKind::kForward) most = std::max(most, ++live);
      if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kWeightGradient) --live;
    }
    return most;
  }

  std::vector<Action> row_;
  std::size_t cursor_ = 0;
  std::size_t end_;  ///< of this part of the step
  std::set<Action> ready_;
};

class ArrivalPolicy final : public Policy {
 public:
  explicit ArrivalPolicy(ArrivalLimits limits) : limits_(limits), left_(limits.actions) {}

  void became_ready(Action action) override {
    const bool starts = action.kind == ActionKind::kForward && action.stage == limits_.layer_range;
    const bool early = limits_.two_parts && action.kind != ActionKind::kForward;
    (early ? early_ : starts ? new_ : ready_).push_back(action);
  }
  std::optional<Action> next() override {
    // Micro-batches in flight go before new ones, so that no more are in flight than needed.
    if (!ready_.empty()) {
      const Action action = take(ready_);
      if (limits_.backwards && action.stage == limits_.layer_range && action.kind == ActionKind::kBackward)
        --in_flight_;
      return action;
    }
    if (new_.empty() || (limits_.max_in_flight > 0 && in_flight_ >= limits_.max_in_flight))
      return std::nullopt;
    ++in_flight_;
    return take(new_);
  }
  std::optional<Action> next_within(int) override { return next(); }
  /// Unknown: the order of arrival is not known in advance.
  std::optional<Action> next_backward() const override { return std::nullopt; }
  bool any_left() const override { return left_ > 0; }
  void begin_backwards() override {
    limits_.two_parts = false;
    left_ = limits_.actions;
    for (const Action& action : std::exchange(early_, {})) became_ready(action);
  }
  void credit() override { --in_flight_; }

 private:
  Action take(std::deque<Action>& from) {
    const Action action = from.front();
    from.pop_front();
    --left_;
    return action;
  }

  ArrivalLimits limits_;
  int left_;
  int in_flight_ = 0;
  std::deque<Action> ready_;
  std::deque<Action> new_;
  std::deque<Action> early_;  ///< backwards of the second part
};

}  // namespace

std::unique_ptr<Policy> make_table_policy(std::vector<Action> row, bool two_parts) {
  return std::make_unique<TablePolicy>(std::move(row), two_parts);
}

std::unique_ptr<Policy> make_arrival_policy(ArrivalLimits limits) {
  return std::make_unique<ArrivalPolicy>(limits);
}

std::unique_ptr<Policy> make_policy(const LocalPipeline& local, const StepBegin& begin,
                                    const schedule::Table* table) {
  const bool two_parts = begin.kind == StepKind::kForward;
  if (table != nullptr)
    return make_table_policy(table->actions[static_cast<std::size_t>(local.me)], two_parts);
  int ranges = 0;
  for (int range = 0; range <= local.last_layer_range(); ++range)
    ranges += local.owns_layer_range(range) ? 1 : 0;
  const int forwards = ranges * static_cast<int>(begin.rows.size());
  ArrivalLimits limits{.actions = begin.kind == StepKind::kTrain ? 2 * forwards : forwards,
                       .two_parts = two_parts};
  if (local.owns_layer_range(0) && !two_parts) {
    const int limit = local.options.max_in_flight;
    limits.layer_range = 0;
    limits.max_in_flight = limit > 0 ? limit : 2 * static_cast<int>(local.ranks().size());
    limits.backwards = has_backwards(begin.kind);
  }
  return make_arrival_policy(limits);
}

}  // namespace torchspan::pipeline
