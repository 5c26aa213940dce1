#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "data_parallel/reducer_impl.h"

namespace torchspan::data_parallel {

/// On whatever thread brings the end: nobody else works on the pass's gradients any more.
void Reducer::Impl::pass_over(const RoundPtr& round) {
  {
    MutexLock lock(mutex_);
    if (round_ != round || !round->concluded) return;
  }
  struct Over {
    Impl& self;
    ~Over() {
      RoundPtr over;
      {
        MutexLock lock(self.mutex_);
        over.swap(self.round_);
      }
      over->over->set_value();
    }
  } over{*this};
  if (!round->finished.done() || round->finished.error()) return;
  const at::NoGradGuard no_grad;
  write_back(*round);
  move_into_rebuilt(*round);
}

void Reducer::Impl::write_back(Round& round) {
  const auto* status = status_.data_ptr<std::int32_t>();
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    const bool globally_unused = tracks_use_ && status[kStatusUsed + slot % count_] == 0;
    if (!globally_unused) write_slot(round, slot);
  }
  for (const auto& [slot, gradient] : round.kept) {
    if (status[kStatusUsed + slot % count_] != 0) continue;
    if (round.in_place && round.shared[slot] == 0) {
      const at::Tensor& view = buckets_->view(slot);
      view.copy_(gradient);
      round.sink->replace(tensor(slot), view);
    }
  }
}

void Reducer::Impl::write_slot(Round& round, std::size_t slot) {
  const at::Tensor& view = buckets_->view(slot);
  const at::Tensor gradient = round.sink->gradient(tensor(slot));
  if (buckets_->sparse(buckets_->bucket_of(slot))) {
    round.sink->replace(tensor(slot), view);
  } else if (round.in_place && round.shared[slot] == 0) {
    if (!buckets_->holds(slot, gradient)) round.sink->replace(tensor(slot), view);
  } else if (round.sink->writes_grad_field() && gradient.defined()) {
    gradient.copy_(view);
  } else {
    round.sink->replace(tensor(slot), view.clone());
  }
}

void Reducer::Impl::move_into_rebuilt(Round& round) {
  if (!round.rebuilt) return;
  const at::NoGradGuard no_grad;
  const std::unique_ptr<Buckets> old = std::exchange(buckets_, std::move(round.rebuilt));
  note_buckets();
  for (std::size_t slot = 0; round.in_place && slot < slots(); ++slot) {
    const at::Tensor gradient = round.sink->gradient(tensor(slot));
    if (!old->holds(slot, gradient)) continue;
    buckets_->put(slot, gradient, 1);
    round.sink->replace(tensor(slot), buckets_->view(slot));
  }
  MutexLock lock(mutex_);
  stats_.rebuilt = true;
}

}  // namespace torchspan::data_parallel
