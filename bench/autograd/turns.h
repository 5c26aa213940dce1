#pragma once
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::bench {

/// Samples of one round by figure: microseconds, or bytes where the name says so.
using Samples = std::map<std::string, std::vector<double>>;

/// One run of a side; returns the microseconds of it that count.
using Timed = std::function<double()>;

/// Runs the sides in turns, `most` times each or for as long as `limit`: first some runs that do not count.
/// The side that begins changes from turn to turn, so that none always runs in the other's warm cache.
inline void take_turns(Executor& executor, Samples& samples,
                       const std::vector<std::pair<std::string, Timed>>& sides, int most, Duration limit) {
  for (int i = 0; i < std::max(5, most / 10); ++i) {
    for (const auto& [name, once] : sides) once();
  }
  const Deadline enough = executor.deadline_in(limit);
  for (int i = 0; i < most && (i < 3 || !enough.passed(executor.now())); ++i) {
    for (std::size_t k = 0; k < sides.size(); ++k) {
      const auto& [name, once] = sides[(k + static_cast<std::size_t>(i)) % sides.size()];
      samples[name].push_back(once());
    }
  }
}

/// Microseconds from one point in time to another.
inline double micros(TimePoint from, TimePoint to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

}  // namespace torchspan::bench
