#include <deque>
#include <utility>

#include "pipeline/policies/policy.h"

namespace torchspan::pipeline {
namespace {

using schedule::Action;
using schedule::ActionKind;

class ArrivalPolicy final : public Policy {
 public:
  explicit ArrivalPolicy(ArrivalLimits limits) : limits_(limits) {}

  void became_ready(const Action& action) override { (starts(action) ? new_ : ready_).push_back(action); }
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
  /// Unknown: the order of arrival is not known in advance.
  std::optional<Action> next_backward() const override { return std::nullopt; }
  void credit() override { --in_flight_; }

 private:
  bool starts(const Action& action) const {
    return action.kind == ActionKind::kForward && action.stage == limits_.layer_range;
  }
  static Action take(std::deque<Action>& from) {
    const Action action = from.front();
    from.pop_front();
    return action;
  }

  const ArrivalLimits limits_;
  int in_flight_ = 0;
  std::deque<Action> ready_;
  std::deque<Action> new_;
};

}  // namespace

std::unique_ptr<Policy> make_arrival_policy(ArrivalLimits limits) {
  return std::make_unique<ArrivalPolicy>(limits);
}

}  // namespace torchspan::pipeline
