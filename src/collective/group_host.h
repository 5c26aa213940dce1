#pragma once
#include <memory>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan::collective {

/// Runs the waits and continuations of a group's futures on one thread. It is separate from the backend,
/// whose destructor joins that thread: so a thread that completes a future never holds the last reference to
/// the backend.
class GroupHost : public FutureHost {
 public:
  explicit GroupHost(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)),
        executor_(runtime_->executor),
        pool_(std::make_shared<Pool>(executor_, PoolOptions{.name = "group", .threads = 1})) {}

  Executor& executor() override { return executor_; }
  void post(UniqueFunction<void()> job) override { pool_->post(std::move(job)); }
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override {
    pool_->wait(parker, done, deadline);
  }

  /// Ends the thread. A pool thread cannot join itself: if a continuation drops the last handle of a group,
  /// that thread ends with the runtime, or never if the group was the runtime's last user (`over`).
  static void close(std::shared_ptr<GroupHost> host, bool over) {
    const std::shared_ptr<Pool> pool = host->pool_;
    if (!pool->is_pool_thread()) return pool->stop();
    const std::shared_ptr<Runtime> runtime = std::move(host->runtime_);  // the runtime will hold the host
    if (over) static_cast<void>(new std::shared_ptr<Runtime>(runtime));
    runtime->deferred_destroy.keep(std::move(host));
  }

 protected:
  Pool& pool() { return *pool_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  Executor& executor_;
  const std::shared_ptr<Pool> pool_;
};

}  // namespace torchspan::collective
