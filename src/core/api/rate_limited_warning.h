#pragma once
#include <cstdint>
#include <string>

#include <torchspan/core/log.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan {

/// A kind of warning that unauthenticated peers can provoke without limit. The first one is logged at once;
/// later ones at most once per `pause`, each with the number suppressed since the last. Thread-safe.
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
