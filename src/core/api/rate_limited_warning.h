#pragma once
#include <cstdint>
#include <string>

#include <torchspan/core/log.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan {

/// A kind of warning that strangers can provoke as often as they like: the first is written at once, then one
/// at most every `pause`, which says how many were kept back since. Thread-safe.
class RateLimitedWarning {
 public:
  RateLimitedWarning(Log& log, Executor& executor, Duration pause = std::chrono::seconds(10))
      : log_(log), executor_(executor), pause_(pause) {}

  void write(const std::string& text);

 private:
  Log& log_;
  Executor& executor_;
  const Duration pause_;
  Mutex mutex_;
  TimePoint next_ TORCHSPAN_GUARDED_BY(mutex_) = TimePoint::min();
  std::uint64_t kept_back_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan
