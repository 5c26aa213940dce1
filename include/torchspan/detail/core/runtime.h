#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/log.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/metrics.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// Keeps objects that the releasing thread must not destroy, such as a pool released by its own thread,
/// until this object is destroyed. Thread-safe.
class DeferredDestroy {
 public:
  void keep(std::shared_ptr<void> thing) {
    MutexLock lock(mutex_);
    things_.push_back(std::move(thing));
  }

 private:
  Mutex mutex_;
  std::vector<std::shared_ptr<void>> things_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Services of one worker that all components share: executor, log, and what it records about itself. Owned by the
/// session or a test, passed by reference.
struct Runtime {
  Runtime(Executor& executor, std::string owner, LogLevel level = LogLevel::kWarning)
      : executor(executor), log(std::move(owner), level), spans(executor) {}
  /// Throws Error{kInvalid} in a forked child.
  void check_process() const { executor.process().check(log.owner()); }

  Executor& executor;
  Log log;
  Metrics metrics;
  SpanRecorder spans;
  ScalarLog scalars;
  ClockSamples clock_samples;
  DeferredDestroy deferred_destroy;  ///< destroyed first
};

/// A runtime on the executor of real threads, which ends with the last handle.
inline std::shared_ptr<Runtime> make_own_runtime(const std::string& owner, LogLevel level) {
  struct Ground {
    Ground(const std::string& owner, LogLevel level)
        : executor(make_executor()), runtime(*executor, owner, level) {}
    const std::unique_ptr<Executor> executor;
    Runtime runtime;
  };
  const auto ground = std::make_shared<Ground>(owner, level);
  return {ground, &ground->runtime};
}

}  // namespace torchspan
