#include "elastic/rule/participant.h"

#include <algorithm>

namespace torchspan::elastic {

void Participant::commit() {
  ++committed_;
  prepared_ = false;
}

Report Participant::report() const {
  return {
      .generation = generation_, .committed = committed_, .holds_state = holds_state_, .prepared = prepared_};
}

Participant::Adoption Participant::adopt(const Generation& generation, int rank) {
  const bool holds = std::binary_search(generation.holders.begin(), generation.holders.end(), rank);
  const bool apply = holds && prepared_ && generation.step == committed_ + 1;
  generation_ = generation.number;
  prepared_ = false;
  if (apply) {
    ++committed_;
    return Adoption::kApply;
  }
  if (holds && generation.step == committed_) return Adoption::kDiscard;
  committed_ = generation.step;
  holds_state_ = false;
  return Adoption::kCopy;
}

}  // namespace torchspan::elastic
