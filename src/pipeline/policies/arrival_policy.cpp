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

  void became_ready(const Action& action) override { (enters(action) ? outside_ : ready_).push_back(action); }
  std::optional<Action> next() override {
    // What is inside goes before what would come in, so that the limit is reached by need only.
    if (!ready_.empty()) {
      const Action action = take(ready_);
      if (limits_.backwards && action.stage == limits_.layer_range && action.kind == ActionKind::kBackward)
        --inside_;
      return action;
    }
    if (outside_.empty() || (limits_.max_in_flight > 0 && inside_ >= limits_.max_in_flight))
      return std::nullopt;
    ++inside_;
    return take(outside_);
  }
  /// The oldest micro-batch's is the likeliest, but nothing is certain.
  std::optional<Action> next_backward() const override { return std::nullopt; }
  void credit() override { --inside_; }

 private:
  bool enters(const Action& action) const {
    return action.kind == ActionKind::kForward && action.stage == limits_.layer_range;
  }
  static Action take(std::deque<Action>& from) {
    const Action action = from.front();
    from.pop_front();
    return action;
  }

  const ArrivalLimits limits_;
  int inside_ = 0;
  std::deque<Action> ready_;
  std::deque<Action> outside_;
};

}  // namespace

std::unique_ptr<Policy> make_arrival_policy(ArrivalLimits limits) {
  return std::make_unique<ArrivalPolicy>(limits);
}

}  // namespace torchspan::pipeline
