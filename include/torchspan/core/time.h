#pragma once
// Durations, points in time and deadlines. Includes no LibTorch.
#include <chrono>
#include <cstdint>

namespace torchspan {

using Duration = std::chrono::nanoseconds;

constexpr double to_seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

/// Clock of an Executor: monotonic, real or simulated. Only Executor::now() reads it.
struct ExecutorClock {
  using duration = Duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<ExecutorClock>;
  static constexpr bool is_steady = true;
};
using TimePoint = ExecutorClock::time_point;

/// A point in time at which waiting ends; default-constructed: never.
class Deadline {
 public:
  constexpr Deadline() = default;
  constexpr explicit Deadline(TimePoint at) : at_(at) {}
  static constexpr Deadline never() { return Deadline(); }

  constexpr bool is_never() const { return at_ == TimePoint::max(); }
  constexpr TimePoint at() const { return at_; }
  constexpr bool passed(TimePoint now) const { return now >= at_; }
  /// Time left at `now`: zero if passed, Duration::max() for never.
  constexpr Duration left(TimePoint now) const {
    if (is_never()) return Duration::max();
    return now >= at_ ? Duration::zero() : at_ - now;
  }
  friend constexpr bool operator==(Deadline, Deadline) = default;
  friend constexpr auto operator<=>(Deadline a, Deadline b) { return a.at_ <=> b.at_; }

 private:
  TimePoint at_ = TimePoint::max();
};

/// The earlier of two deadlines.
constexpr Deadline earlier(Deadline a, Deadline b) { return a < b ? a : b; }

}  // namespace torchspan
