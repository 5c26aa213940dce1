#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include <torchspan/detail/core/mutex.h>

namespace torchspan {

/// A counter that any thread may add to; reads are snapshots.
class Counter {
 public:
  void add(std::uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  void subtract(std::uint64_t amount = 1) { value_.fetch_sub(amount, std::memory_order_relaxed); }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// The counters of one worker, by name ("rpc.calls_sent"). A counter lives as long as its Metrics: look it
/// up once and keep the reference.
class Metrics {
 public:
  Counter& counter(const std::string& name);
  /// The same for a value that may also fall.
  Counter& gauge(const std::string& name);
  std::map<std::string, std::uint64_t> snapshot() const;
  /// The names that were passed to gauge().
  std::set<std::string> gauges() const;

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::unique_ptr<Counter>> counters_ TORCHSPAN_GUARDED_BY(mutex_);
  std::set<std::string> gauges_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan
