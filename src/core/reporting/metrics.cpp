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

}  // namespace torchspan
