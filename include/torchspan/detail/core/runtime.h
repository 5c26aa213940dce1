#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/log.h>
#include <torchspan/core/metrics.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// Things that must not be destroyed by the thread that gives them up, such as a pool by a thread of its own:
/// kept until this object ends. Thread-safe.
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

/// What every room needs of its worker: the door to threads and time, the log, the counters and the spans.
/// Owned by the session or by a test, handed down by reference, one per worker.
struct Runtime {
  Runtime(Executor& executor, std::string who, LogLevel level = LogLevel::kWarning)
      : executor(executor), log(std::move(who), level), spans(executor) {}
  Executor& executor;
  Log log;
  Metrics metrics;
  SpanRing spans;
  DeferredDestroy remains;  ///< ends first
};

}  // namespace torchspan
