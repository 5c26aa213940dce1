#include "data_parallel/rounds/round_gradients.h"

#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {

RoundGradients::RoundGradients(ReducerParts& parts, double divisor, bool in_place)
    : parts_(parts),
      round_(parts.meter.begin_round()),
      buckets_(parts.plan.buckets()),
      launcher_(std::make_shared<BucketLauncher>(
          BucketLauncher::Parts{parts.slots, parts.reducer, parts.stream}, buckets_, divisor)),
      timer_(std::make_shared<RoundTimer>(parts.runtime, parts.holds, round_)),
      transfer_(parts.slots, buckets_, in_place),
      accepted_(parts.slots.size()) {
  order_.reserve(parts.slots.count());
}

void RoundGradients::accept(std::size_t slot) {
  MutexLock lock(mutex_);
  if (std::exchange(accepted_[slot], 1) != 0) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' got a second gradient in one step, after the first one was put into its "
                    "bucket: it is used again in a backward pass inside the backward pass "
                    "(checkpointing), or outside the wrapped forward, or in a backward pass over "
                    "another output. If all steps have the same graph, set static_graph, which allows this",
                    parts_.slots.name(slot)));
  }
  if (slot < parts_.slots.count()) order_.push_back(static_cast<std::uint32_t>(slot));
}

void RoundGradients::fill(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient) {
  const std::size_t bucket = buckets_->bucket_of(slot);
  const bool shared = parts_.hooks.is_shared(slot);
  transfer_.put(sink, slot, gradient, {.factor = launcher_->factor(bucket), .shared = shared});
  launcher_->filled(bucket, [&] { transfer_.complete(sink, bucket); });
  timer_->gradient_arrived();
}

void RoundGradients::fill_unused(engine::GradientSink& sink, std::size_t slot) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(accepted_[slot], 1) != 0) return;
  }
  parts_.meter.count_unused();
  const at::Tensor gradient = sink.gradient(parts_.slots.tensor(slot));
  transfer_.keep(slot, gradient);
  fill(sink, slot, gradient);
}

void RoundGradients::copy_delayed(engine::GradientSink& sink) {
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) transfer_.complete(sink, bucket);
}

std::vector<std::size_t> RoundGradients::missing() const {
  MutexLock lock(mutex_);
  std::vector<std::size_t> slots;
  for (std::size_t slot = 0; slot < accepted_.size(); ++slot) {
    if (accepted_[slot] == 0) slots.push_back(slot);
  }
  return slots;
}

std::vector<std::uint32_t> RoundGradients::order() const {
  MutexLock lock(mutex_);
  return order_;
}

}  // namespace torchspan::data_parallel
