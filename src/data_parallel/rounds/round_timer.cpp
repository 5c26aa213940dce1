#include "data_parallel/rounds/round_timer.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::data_parallel {

RoundTimer::RoundTimer(Runtime& runtime, HoldCount& holds, std::uint64_t round)
    : runtime_(runtime),
      holds_(holds),
      round_(round),
      measured_(round <= 10 || round % 100 == 0 || runtime.spans.is_traced()) {}

void RoundTimer::gradient_arrived() {
  if (!measured_) return;
  const TimePoint now = runtime_.executor.now();
  MutexLock lock(mutex_);
  last_gradient_ = now;
  if (!first_gradient_) first_gradient_ = now;
}

void RoundTimer::launches_begin() {
  if (!measured_) return;
  const TimePoint now = runtime_.executor.now();
  MutexLock lock(mutex_);
  first_launch_ = now;
}

void RoundTimer::launched(std::size_t bucket, std::uint64_t bytes, const Future<at::Tensor>& work) {
  if (!measured_) return;
  work.add_done_callback([hold = holds_.take(), &runtime = runtime_, bucket, bytes, round = round_,
                          began = runtime_.executor.now()](const Future<at::Tensor>&) {
    runtime.spans.record(SpanKind::kBucket, fmt::format("bucket {}", bucket), began,
                         SpanLink{.id = round, .part = static_cast<std::int32_t>(bucket), .bytes = bytes});
  });
}

void RoundTimer::backward_ended() {
  std::optional<TimePoint> began;
  {
    MutexLock lock(mutex_);
    began = first_gradient_;
    waiting_.emplace(runtime_.spans, SpanKind::kWait, "wait for reduction", round_);
  }
  if (began) runtime_.spans.record(SpanKind::kBucket, "backward", *began, round_);
}

std::optional<RoundTimes> RoundTimer::reduced() {
  {
    MutexLock lock(mutex_);
    waiting_.reset();
  }
  if (!measured_) return std::nullopt;
  const TimePoint now = runtime_.executor.now();
  RoundTimes times{.round = round_};
  TimePoint launched;
  {
    MutexLock lock(mutex_);
    if (first_gradient_) times.backward = last_gradient_ - *first_gradient_;
    launched = first_launch_;
    times.communication = now - launched;
    times.overlap = std::max(Duration::zero(), std::min(last_gradient_, now) - launched);
  }
  runtime_.spans.record(SpanKind::kBucket, "reduction", launched, round_);
  return times;
}

}  // namespace torchspan::data_parallel
