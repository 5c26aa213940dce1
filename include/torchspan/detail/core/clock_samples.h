#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan {

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
