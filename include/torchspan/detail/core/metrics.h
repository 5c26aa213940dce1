#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>
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

/// One point of a curve, such as a loss.
struct Scalar {
  std::string tag;
  std::int64_t step = 0;
  double value = 0;
  TimePoint at;
};

/// The last 65,536 scalars that a program logged. Thread-safe.
class ScalarLog {
 public:
  /// Without `step`, the values of a tag are numbered from 0.
  void add(std::string_view tag, double value, std::optional<std::int64_t> step, TimePoint now);
  /// Returns the scalars with numbers from `next` on, which advances. Adds those that were dropped before
  /// they could be read to `lost`.
  std::vector<Scalar> read(std::uint64_t& next, std::uint64_t& lost) const;

 private:
  static constexpr std::size_t kMost = 65536;

  mutable Mutex mutex_;
  std::deque<Scalar> scalars_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t dropped_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::int64_t, std::less<>> steps_ TORCHSPAN_GUARDED_BY(mutex_);  ///< next, by tag
};

/// One request and its reply between this worker and `rank`: `sent` and `arrived` by this worker's clock,
/// `received` and `answered` by the other's.
struct ClockSample {
  int rank = 0;
  TimePoint sent;
  TimePoint received;
  TimePoint answered;
  TimePoint arrived;
};

/// The last 4,096 clock samples of a worker. Thread-safe.
class ClockSamples {
 public:
  void add(const ClockSample& sample);
  /// Returns the samples with numbers from `next` on, which advances.
  std::vector<ClockSample> read(std::uint64_t& next) const;

 private:
  static constexpr std::size_t kMost = 4096;

  mutable Mutex mutex_;
  std::vector<ClockSample> samples_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t dropped_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan
