#include "data_parallel/passes/hold_count.h"

namespace torchspan::data_parallel {

HoldCount::Hold HoldCount::take() {
  {
    MutexLock lock(mutex_);
    ++count_;
  }
  return {this, [](HoldCount* self) { self->release(); }};
}

void HoldCount::release() {
  MutexLock lock(mutex_);
  if (--count_ == 0 && waiter_ != nullptr) waiter_->unpark();
}

void HoldCount::wait() {
  const auto parker = executor_.make_parker();
  for (;;) {
    {
      MutexLock lock(mutex_);
      waiter_ = count_ > 0 ? parker.get() : nullptr;
      if (count_ == 0) return;
    }
    parker->park(Deadline::never());
  }
}

}  // namespace torchspan::data_parallel
