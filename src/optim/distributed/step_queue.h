#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <set>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::optim {

/// Runs jobs that each need exclusive use of a set of keys (parameters). A job begins when no unfinished job
/// before it shares a key with it. Jobs over the same parameters run in order, others concurrently; no job
/// starves, and none can deadlock, because a job holds all its keys or none. Waiting jobs block no thread.
class StepQueue {
 public:
  using Keys = std::set<const void*>;
  explicit StepQueue(std::weak_ptr<ContinuationExecutor> continuations)
      : continuations_(std::move(continuations)) {}

  /// Runs `job` on the executor. The future completes when it returns, or with what it throws.
  Future<Unit> run(Keys keys, UniqueFunction<void()> job);

 private:
  struct Job {
    Keys keys;
    UniqueFunction<void()> work;
    Promise<Unit> promise;
    bool running = false;
  };
  using Jobs = std::list<std::shared_ptr<Job>>;
  /// Starts all jobs that may begin. Call it after each change.
  void start_ready();
  std::vector<std::shared_ptr<Job>> take_ready() TORCHSPAN_REQUIRES(mutex_);
  void finish(const std::shared_ptr<Job>& job);

  const std::weak_ptr<ContinuationExecutor> continuations_;
  Mutex mutex_;
  Jobs jobs_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::optim
