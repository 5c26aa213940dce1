#pragma once
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/core/mutex.h>

namespace torchspan {

struct PoolOptions {
  std::string name = "pool";
  std::size_t threads = 2;        ///< runnable threads at most
  std::size_t max_threads = 256;  ///< threads at most, the blocked ones included
};

/// Threads that run posted jobs. Grows while its threads are blocked in a wait that it knows of (wait(), or a
/// BlockingScope), so that nested calls cannot starve each other. A job's exception ends the process: jobs
/// catch.
class Pool final : public FutureHost {
 public:
  Pool(Executor& executor, PoolOptions options);
  /// stop(), if nobody did.
  ~Pool() override;

  Executor& executor() override { return executor_; }
  void post(UniqueFunction<void()> job) override;
  /// Parks; a pool thread that waits is counted as blocked. Throws kOverloaded when it would have to wait
  /// although jobs are queued, every thread is blocked and the cap is reached.
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override;

  /// Runs what is queued, then ends the threads and waits for them. Later posts run on the poster's thread.
  /// Must not be called from a pool thread.
  void stop();
  bool is_pool_thread() const;
  std::size_t thread_count() const;
  std::size_t queued() const;

  /// Tells the pool that this thread is blocked until the scope ends; nothing on other threads.
  class BlockingScope {
   public:
    explicit BlockingScope(Pool& pool);
    ~BlockingScope();
    BlockingScope(const BlockingScope&) = delete;

   private:
    Pool* pool_ = nullptr;
  };

 private:
  struct Worker {
    Thread thread;
    std::unique_ptr<Parker> parker;
    bool ended = false;
  };
  void run(Worker& self);
  void begin_blocking();
  void end_blocking();
  /// Wakes an idle thread or starts a new one when a queued job could run.
  void staff() TORCHSPAN_REQUIRES(mutex_);

  Executor& executor_;
  const PoolOptions options_;
  mutable Mutex mutex_;
  std::deque<UniqueFunction<void()>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Worker>> workers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Worker*> idle_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t live_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t blocked_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool stopping_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan
