#include <algorithm>

#include <torchspan/detail/core/metrics.h>

namespace torchspan {

Counter& Metrics::counter(const std::string& name) {
  MutexLock lock(mutex_);
  auto& slot = counters_[name];
  if (!slot) slot = std::make_unique<Counter>();
  return *slot;
}

Counter& Metrics::gauge(const std::string& name) {
  {
    MutexLock lock(mutex_);
    gauges_.insert(name);
  }
  return counter(name);
}

std::set<std::string> Metrics::gauges() const {
  MutexLock lock(mutex_);
  return gauges_;
}

std::map<std::string, std::uint64_t> Metrics::snapshot() const {
  MutexLock lock(mutex_);
  std::map<std::string, std::uint64_t> values;
  for (const auto& [name, counter] : counters_) values[name] = counter->value();
  return values;
}

void ScalarLog::add(std::string_view tag, double value, std::optional<std::int64_t> step, TimePoint now) {
  MutexLock lock(mutex_);
  auto next = steps_.find(tag);
  if (next == steps_.end()) next = steps_.emplace(std::string(tag), 0).first;
  const std::int64_t number = step.value_or(next->second);
  next->second = number + 1;
  scalars_.push_back({std::string(tag), number, value, now});
  if (scalars_.size() <= kMost) return;
  scalars_.pop_front();
  ++dropped_;
}

std::vector<Scalar> ScalarLog::read(std::uint64_t& next, std::uint64_t& lost) const {
  MutexLock lock(mutex_);
  const std::uint64_t first = std::max(next, dropped_);
  lost += first - next;
  next = dropped_ + scalars_.size();
  return {scalars_.begin() + static_cast<std::ptrdiff_t>(first - dropped_), scalars_.end()};
}

void ClockSamples::add(const ClockSample& sample) {
  MutexLock lock(mutex_);
  samples_.push_back(sample);
  if (samples_.size() <= kMost) return;
  constexpr std::size_t kDrop = kMost / 2;
  samples_.erase(samples_.begin(), samples_.begin() + kDrop);
  dropped_ += kDrop;
}

std::vector<ClockSample> ClockSamples::read(std::uint64_t& next) const {
  MutexLock lock(mutex_);
  const std::uint64_t first = std::max(next, dropped_);
  next = dropped_ + samples_.size();
  return {samples_.begin() + static_cast<std::ptrdiff_t>(first - dropped_), samples_.end()};
}

}  // namespace torchspan
