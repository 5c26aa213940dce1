#pragma once
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::bench {

/// Samples of one round by figure, in microseconds; in bytes where the name says so.
using Samples = std::map<std::string, std::vector<double>>;

/// Runs one side once; returns the measured microseconds.
using Timed = std::function<double()>;

/// Runs the sides in turns, `most` times each or until `limit` has passed, after some warm-up runs that are
/// not counted. The side that begins changes from turn to turn, so that none always finds the other's warm
/// cache.
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

/// Microseconds between two points in time.
inline double micros(TimePoint from, TimePoint to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

}  // namespace torchspan::bench
