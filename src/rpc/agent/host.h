#pragma once
#include <atomic>
#include <memory>

#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>

#include "rpc/agent/driver_lock.h"

namespace torchspan::rpc {

/// Runs continuations of a worker's futures on its pool, and waits for the futures. A waiter polls the
/// transport for a short time before it sleeps.
class Host final : public FutureHost {
 public:
  Host(std::shared_ptr<Runtime> runtime, PoolOptions options)
      : runtime_(std::move(runtime)), pool_(runtime_->executor, std::move(options)) {}
  Executor& executor() override { return pool_.executor(); }
  void post(UniqueFunction<void()> job) override { pool_.post(std::move(job)); }
  /// Continuations keep the environment of the thread that adds them.
  UniqueFunction<void()> bind(UniqueFunction<void()> continuation) override;
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override;
  std::string worker_name() const override { return runtime_->log.owner(); }
  Pool& pool() { return pool_; }
  void set_driver(std::weak_ptr<Driver> driver) { driver_ = std::move(driver); }

 private:
  const std::shared_ptr<Runtime> runtime_;  ///< for waiters that return after the worker ended
  Pool pool_;
  std::weak_ptr<Driver> driver_;  ///< set once, before the first wait
};

}  // namespace torchspan::rpc
