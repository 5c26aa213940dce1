#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/detail/core/metrics.h>

namespace torchspan::launch {

/// How much another clock is ahead of the reference clock, as a line in the reference's time, with a bound of
/// its error. Times are nanoseconds.
struct ClockLine {
  std::int64_t origin = 0;  ///< reference time
  double offset = 0;        ///< at the origin
  double drift = 0;         ///< offset gained per unit of reference time
  double error = 0;         ///< largest at the times of the samples
  std::int64_t first = 0;   ///< reference time of the first sample that the line uses
  std::int64_t last = 0;
  double error_rate = 0;  ///< by which the bound grows per unit of time before `first` and after `last`

  /// Converts a time of the other clock.
  std::int64_t to_reference(std::int64_t time) const;
  /// The bound at a reference time.
  double error_at(std::int64_t time) const;
};

/// Fits the clock of the samples' rank to that of the worker that took them: a least-squares line through the
/// fastest sample of each of up to 16 windows (Mills, Computer Network Time Synchronization, 2006, on filters
/// of the smallest delay). The bound holds whatever the two directions' delays are, if the drift is constant and at
/// most 1000 ppm. Throws Error{kInvalid} without usable samples.
ClockLine fit_clock(const std::vector<ClockSample>& samples);

}  // namespace torchspan::launch
