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

/// Runs jobs that each need a set of keys (parameters) for themselves: one begins when no job that came
/// before it and has not ended shares a key with it. So jobs over the same parameters run in the order they
/// came, others at once, none starves, and none can deadlock: a job has all its keys or none. Waiting jobs
/// hold no thread.
class StepQueue {
 public:
  using Keys = std::set<const void*>;
  explicit StepQueue(std::weak_ptr<FutureHost> host) : host_(std::move(host)) {}

  /// The future completes with what `job` returns or throws; the job runs on the host.
  Future<Unit> run(Keys keys, UniqueFunction<void()> job);

 private:
  struct Job {
    Keys keys;
    UniqueFunction<void()> work;
    Promise<Unit> promise;
    bool running = false;
  };
  using Jobs = std::list<std::shared_ptr<Job>>;
  /// Starts every job that may begin; called after each change.
  void start_ready();
  std::vector<std::shared_ptr<Job>> take_ready() TORCHSPAN_REQUIRES(mutex_);
  void finish(const std::shared_ptr<Job>& job);

  const std::weak_ptr<FutureHost> host_;
  Mutex mutex_;
  Jobs jobs_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::optim
