#pragma once
#include <functional>
#include <map>
#include <string>
#include <sys/types.h>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::bench {

/// Samples of one round by figure, in microseconds; in percent for processor use.
using Samples = std::map<std::string, std::vector<double>>;

/// Takes samples of work in one process.
class Meter {
 public:
  explicit Meter(Executor& executor, pid_t worker = 0, int longer = 1)
      : executor_(executor), worker_(worker), longer_(longer) {}

  /// Runs `once` a few times uncounted, then `most` times, or as many times as fit into half a second (in a quick run, a
  /// tenth of one) but at least 4; all multiplied by `longer`. Returns the microseconds of each run, divided by `calls`.
  std::vector<double> times(int most, const std::function<void()>& once, int calls = 1) const;
  /// Returns the share of one processor, in percent, that the worker's process used while no calls arrived.
  double idle_cpu() const;

 private:
  Executor& executor_;
  const pid_t worker_;
  const int longer_;
};

}  // namespace torchspan::bench
