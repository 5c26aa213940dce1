#include "elastic/data/step_cursor.h"

namespace torchspan::elastic {

const ElasticStep& StepCursor::begin(int rank, int size, std::uint64_t generation) {
  step_ = dealer_.deal(position_, rank, size);
  step_->generation = generation;
  after_ = dealer_.after(position_, size);
  return *step_;
}

}  // namespace torchspan::elastic
