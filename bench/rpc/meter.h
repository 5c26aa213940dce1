#pragma once
#include <functional>
#include <map>
#include <string>
#include <sys/types.h>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::bench {

/// Samples of one round by figure: microseconds, or per cent for the use of processors.
using Samples = std::map<std::string, std::vector<double>>;

/// Takes samples of work in one process.
class Meter {
 public:
  explicit Meter(Executor& executor, pid_t worker = 0, int longer = 1)
      : executor_(executor), worker_(worker), longer_(longer) {}

  /// Microseconds of each run of `once`: first some that do not count, then `most`, or as many as half a
  /// second has room for, but 4 at least; all that `longer` times. A run that stands for `calls` calls gives
  /// the time of one.
  std::vector<double> times(int most, const std::function<void()>& once, int calls = 1) const;
  /// How much of one processor the worker's process used while no calls arrived, in per cent.
  double idle_cpu() const;

 private:
  Executor& executor_;
  const pid_t worker_;
  const int longer_;
};

}  // namespace torchspan::bench
