#include "data_parallel/reducer_meter.h"

#include <utility>

namespace torchspan::data_parallel {

void ReducerMeter::begin_forward() {
  const TimePoint now = runtime_.executor.now();
  MutexLock lock(mutex_);
  forward_began_ = now;
}

void ReducerMeter::end_forward() {
  const TimePoint now = runtime_.executor.now();
  std::optional<TimePoint> began;
  std::uint64_t forward = 0;
  {
    MutexLock lock(mutex_);
    forward = ++stats_.forwards;
    began = std::exchange(forward_began_, std::nullopt);
    if (began) stats_.forward = now - *began;
  }
  if (began) runtime_.spans.record(SpanKind::kBucket, "forward", *began, forward);
}

void ReducerMeter::count_aborted() {
  MutexLock lock(mutex_);
  ++stats_.aborted;
}

void ReducerMeter::count_unused() {
  MutexLock lock(mutex_);
  ++stats_.unused;
}

void ReducerMeter::count_reduction() {
  MutexLock lock(mutex_);
  ++stats_.reductions;
}

std::uint64_t ReducerMeter::reductions() const {
  MutexLock lock(mutex_);
  return stats_.reductions;
}

void ReducerMeter::set_gradient_order(std::vector<std::string> names) {
  MutexLock lock(mutex_);
  stats_.gradient_order = std::move(names);
}

void ReducerMeter::set_times(const RoundTimes& times) {
  MutexLock lock(mutex_);
  stats_.measured = times.round;
  stats_.backward = times.backward;
  stats_.communication = times.communication;
  stats_.overlap = times.overlap;
}

void ReducerMeter::set_buckets(const Buckets& buckets, const ParameterSlots& slots) {
  std::vector<std::size_t> bytes;
  std::vector<std::vector<std::string>> parameters;
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    bytes.push_back(buckets.bytes(bucket));
    parameters.emplace_back();
    for (const std::size_t parameter : buckets.parameters(bucket))
      parameters.back().push_back(slots.name(parameter));
  }
  MutexLock lock(mutex_);
  stats_.bucket_bytes = std::move(bytes);
  stats_.bucket_parameters = std::move(parameters);
}

void ReducerMeter::set_rebuilt() {
  MutexLock lock(mutex_);
  stats_.rebuilt = true;
}

ReducerStats ReducerMeter::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

}  // namespace torchspan::data_parallel
