#pragma once
#include <memory>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/listed_wait.h"

namespace torchspan::collective {

/// Runs the continuations of a group's futures on one thread, and waits for the futures. Separate from the backend, so that
/// a thread that completes a future never drops the last reference to the backend, which joins that thread.
class GroupExecutor : public ContinuationExecutor {
 public:
  explicit GroupExecutor(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)),
        observed_(runtime_),
        executor_(runtime_->executor),
        pool_(std::make_shared<Pool>(executor_, PoolOptions{.name = "group", .threads = 1})) {}

  Executor& executor() override { return executor_; }
  void post(UniqueFunction<void()> job) override { pool_->post(std::move(job)); }
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override {
    const auto wait = [&](Deadline until) { pool_->wait(parker, done, until); };
    // The group's own thread must not become the last owner of the runtime.
    const std::shared_ptr<Runtime> runtime = pool_->is_pool_thread() ? nullptr : observed_.lock();
    runtime ? wait_listed(runtime->spans, done, deadline, wait) : wait(deadline);
  }

  std::string worker_name() const override {
    const std::shared_ptr<Runtime> runtime = observed_.lock();
    return runtime ? runtime->log.owner() : std::string();
  }

  /// Ends the thread. A pool cannot be stopped by its own thread: if a continuation drops the last handle of
  /// a group, the thread ends with the runtime; or never, if the group was the last user of the runtime
  /// (`over`).
  static void close(std::shared_ptr<GroupExecutor> continuations, bool over) {
    const std::shared_ptr<Pool> pool = continuations->pool_;
    if (!pool->is_pool_thread()) return pool->stop();
    const std::shared_ptr<Runtime> runtime =
        std::move(continuations->runtime_);  // keeps the executor from here on
    if (over) static_cast<void>(new std::shared_ptr<Runtime>(runtime));
    runtime->deferred_destroy.keep(std::move(continuations));
  }

 protected:
  Pool& pool() { return *pool_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  const std::weak_ptr<Runtime> observed_;  ///< for the spans of waiters
  Executor& executor_;
  const std::shared_ptr<Pool> pool_;
};

}  // namespace torchspan::collective
