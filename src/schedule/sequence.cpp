#include "schedule/sequence.h"

#include <algorithm>

namespace torchspan::schedule {

void Sequence::backward(int stage) {
  // A whole backward takes the micro-batch that an input gradient would.
  const int micro_batch = counts_[{ActionKind::kInputGradient, stage}]++;
  add({ActionKind::kBackward, stage, micro_batch});
}

void Sequence::input_gradient(int stage) {
  const int micro_batch = counts_[{ActionKind::kInputGradient, stage}]++;
  add({ActionKind::kInputGradient, stage, micro_batch});
  pending_.push_back({ActionKind::kWeightGradient, stage, micro_batch});
}

void Sequence::oldest_weight_gradient() {
  if (pending_.empty()) return;
  add(pending_.front());
  pending_.pop_front();
}

void Sequence::weight_gradient(int stage) {
  const auto oldest = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const Action& action) { return action.stage == stage; });
  if (oldest == pending_.end()) return;
  add(*oldest);
  pending_.erase(oldest);
}

int Sequence::count(ActionKind kind, int stage) const {
  const auto known = counts_.find({kind, stage});
  return known == counts_.end() ? 0 : known->second;
}

}  // namespace torchspan::schedule
