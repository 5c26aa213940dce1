#pragma once
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan {

struct PoolOptions {
  std::string name = "pool";
  std::size_t threads = 2;                     ///< runnable threads
  std::size_t max_threads = 256;               ///< threads, including blocked ones
  Duration linger = std::chrono::seconds(10);  ///< idle time after which a thread beyond `threads` ends
};

/// Threads that run posted jobs. It grows while threads are blocked in wait() or a BlockingScope, so nested
/// calls cannot starve each other. An exception from a job terminates the process. Futures share ownership;
/// the owner calls stop() before releasing it, because the last reference must not drop on a pool thread
/// that is not yet joined.
class Pool final : public ContinuationExecutor {
 public:
  Pool(Executor& executor, PoolOptions options);
  /// Calls stop() if it was not called.
  ~Pool() override;

  Executor& executor() override { return executor_; }
  /// Queues `job`. Runs it on the calling thread if no thread can be started, or after stop().
  void post(UniqueFunction<void()> job) override;
  /// Parks; a pool thread counts as blocked. If jobs are queued, every thread is blocked and no more can be
  /// started, the newest wait throws kOverloaded, which always frees a thread.
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override;

  /// Runs queued jobs, then ends and joins the threads. Later posts run on the posting thread. Throws
  /// Error{kInvalid} on a pool thread.
  void stop();
  bool is_pool_thread() const;
  std::size_t thread_count() const;
  std::size_t queued() const;
  /// Whether a job is queued or running.
  bool busy() const;

  /// Marks this pool thread as blocked for a scope; no effect on other threads. May be nested. Throws
  /// kOverloaded if jobs are queued and this was the last thread that could run them.
  class BlockingScope;
  /// Allows one thread beyond max_threads while it lives, for a wait that must not throw kOverloaded.
  class ExtraThread;

 private:
  void allow_threads(std::ptrdiff_t more);
  struct Worker {
    std::unique_ptr<Parker> parker;  // declared before the thread, which uses it until it ends
    std::size_t scopes = 0;          ///< nested waits and BlockingScopes
    std::atomic<bool> idle{false};
    Thread thread;
  };
  /// A pool thread inside wait().
  struct Waiter {
    Parker& parker;
    const std::atomic<bool>& done;
    std::atomic<bool> overloaded{false};
  };
  using Workers = std::vector<std::unique_ptr<Worker>>;

  void run(Worker& self);
  /// Spins briefly for the next job before an idle thread sleeps; one thread at a time.
  void spin(const Worker& self);
  UniqueFunction<void()> next_job() TORCHSPAN_REQUIRES(mutex_);
  /// Sleeps until there is work; false if this thread has been idle for too long and must end.
  bool rest(Worker& self, Deadline deadline);
  void retire(Worker& self) TORCHSPAN_REQUIRES(mutex_);

  /// Counts this thread as blocked if it belongs to the pool; else returns null.
  Worker* begin_blocking(Waiter* waiter);
  void end_blocking(Worker& self, Waiter* waiter);
  void leave(Worker& self, Waiter* waiter) TORCHSPAN_REQUIRES(mutex_);

  /// Wakes an idle thread or starts one if a queued job could run.
  void wake_or_add_worker() TORCHSPAN_REQUIRES(mutex_);
  void add_worker() TORCHSPAN_REQUIRES(mutex_);
  /// Jobs are queued, and no thread will become free unless a wait fails.
  bool starved() const TORCHSPAN_REQUIRES(mutex_);
  Error overloaded() const TORCHSPAN_REQUIRES(mutex_);
  Worker* this_worker() const TORCHSPAN_REQUIRES(mutex_);
  std::size_t active() const TORCHSPAN_REQUIRES(mutex_);

  Executor& executor_;
  const OwnerProcess process_;
  const PoolOptions options_;
  mutable Mutex mutex_;
  std::deque<UniqueFunction<void()>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  Workers workers_ TORCHSPAN_GUARDED_BY(mutex_);
  Workers retired_ TORCHSPAN_GUARDED_BY(mutex_);  ///< returning from run(), to be joined
  std::unordered_map<std::thread::id, Worker*> by_thread_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<const Worker*> spinning_{nullptr};
  std::vector<Worker*> idle_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Waiter*> waiters_ TORCHSPAN_GUARDED_BY(mutex_);  ///< oldest first
  std::size_t live_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t blocked_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t started_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t max_threads_ TORCHSPAN_GUARDED_BY(mutex_);
  bool out_of_threads_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the system refused to start the last one
  bool stopping_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

class Pool::BlockingScope {
 public:
  explicit BlockingScope(Pool& pool) : pool_(pool), worker_(pool.begin_blocking(nullptr)) {}
  ~BlockingScope() {
    if (worker_ != nullptr) pool_.end_blocking(*worker_, nullptr);
  }
  BlockingScope(const BlockingScope&) = delete;
  BlockingScope& operator=(const BlockingScope&) = delete;

 private:
  Pool& pool_;
  Worker* const worker_;
};

class Pool::ExtraThread {
 public:
  explicit ExtraThread(Pool& pool) : pool_(&pool) { pool_->allow_threads(1); }
  ExtraThread(ExtraThread&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)) {}
  ~ExtraThread() {
    if (pool_ != nullptr) pool_->allow_threads(-1);
  }

 private:
  Pool* pool_;
};

}  // namespace torchspan
