#pragma once
#include <torchspan/core/time.h>

namespace torchspan {

/// The sum of two durations, of which the first is not negative; Duration::max() if it exceeds that.
constexpr Duration saturated_sum(Duration a, Duration b) {
  return b > Duration::max() - a ? Duration::max() : a + b;
}

/// The limit that an option gives: zero means none.
constexpr Duration no_limit_if_zero(Duration limit) {
  return limit == Duration::zero() ? Duration::max() : limit;
}

/// When a wait that began at `now` ends; timeouts that exceed the clock, such as Duration::max(), mean never.
constexpr Deadline deadline_after(TimePoint now, Duration timeout) {
  return Deadline(TimePoint(saturated_sum(now.time_since_epoch(), timeout)));
}

}  // namespace torchspan
