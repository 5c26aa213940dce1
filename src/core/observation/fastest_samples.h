#pragma once
#include <map>
#include <set>
#include <vector>

#include <torchspan/detail/core/clock_samples.h>

namespace torchspan {

/// Keeps the clock sample of each rank with the smallest delay in a window of time: the others would make the traces of
/// long runs large, and add nothing to the comparison of the clocks. For one thread at a time.
class FastestSamples {
 public:
  void add(const std::vector<ClockSample>& samples);
  /// Returns the samples, by rank, and begins a new window.
  std::vector<ClockSample> take(TimePoint now);
  /// The same if the window has lasted for `length`. Else returns those of ranks that had none yet: without one, the clock
  /// of a worker that is killed during the window would stay unknown.
  std::vector<ClockSample> take_if_due(TimePoint now, Duration length);

 private:
  std::map<int, ClockSample> fastest_;
  std::set<int> known_;  ///< ranks of which a sample was returned
  TimePoint begun_{};    ///< of the window
};

}  // namespace torchspan
