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
  std::size_t threads = 2;                     ///< runnable threads at most
  std::size_t max_threads = 256;               ///< threads at most, the blocked ones included
  Duration linger = std::chrono::seconds(10);  ///< an idle thread beyond `threads` ends after this long
};

/// Threads that run posted jobs. Grows while its threads are blocked in a wait that it knows of (wait(), or a
/// BlockingScope), so that nested calls cannot starve each other. A job's exception ends the process: jobs
/// catch. Held by a shared_ptr, since futures refer to it; its owner calls stop() before letting go, because
/// the last reference must not drop on a pool thread that is still to be joined.
class Pool final : public FutureHost {
 public:
  Pool(Executor& executor, PoolOptions options);
  /// stop(), if nobody did.
  ~Pool() override;

  Executor& executor() override { return executor_; }
  /// Queues `job`. While not one thread can be started it runs on the poster's, as after stop().
  void post(UniqueFunction<void()> job) override;
  /// Parks; a pool thread that waits is counted as blocked. When jobs are queued, every thread is blocked and
  /// no more can be started, the youngest wait throws kOverloaded: only that can free a thread for certain.
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override;

  /// Runs what is queued, then ends the threads and waits for them. Later posts run on the poster's thread.
  /// Throws Error{kInvalid} on a pool thread, which cannot wait for itself.
  void stop();
  bool is_pool_thread() const;
  std::size_t thread_count() const;
  std::size_t queued() const;
  /// Whether a job is queued or runs.
  bool busy() const;

  /// Tells the pool that this thread is blocked until the scope ends; nothing on other threads. May be
  /// nested. Throws kOverloaded when jobs are queued and this was the last thread that could run them.
  class BlockingScope;
  /// Allows one thread more than max_threads while it lives: for a wait that must not fail and would have to
  /// throw kOverloaded.
  class ExtraThread;

 private:
  void allow_threads(std::ptrdiff_t more);
  struct Worker {
    std::unique_ptr<Parker> parker;  // before the thread, which uses it to its end
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
  /// A thread that has just become idle looks for the next job for a moment before it sleeps; one at a time.
  void look_out(const Worker& self);
  UniqueFunction<void()> next_job() TORCHSPAN_REQUIRES(mutex_);
  /// Sleeps until there is work; false when this thread has been idle for too long and ends.
  bool rest(Worker& self, Deadline deadline);
  void retire(Worker& self) TORCHSPAN_REQUIRES(mutex_);

  /// Counts this thread as blocked, if it is one of the pool's: else null.
  Worker* begin_blocking(Waiter* waiter);
  void end_blocking(Worker& self, Waiter* waiter);
  void leave(Worker& self, Waiter* waiter) TORCHSPAN_REQUIRES(mutex_);

  /// Wakes an idle thread or starts a new one when a queued job could run.
  void staff() TORCHSPAN_REQUIRES(mutex_);
  void add_worker() TORCHSPAN_REQUIRES(mutex_);
  /// Jobs are queued, and no thread will come to run them unless a wait fails.
  bool starved() const TORCHSPAN_REQUIRES(mutex_);
  Error overloaded() const TORCHSPAN_REQUIRES(mutex_);
  Worker* this_worker() const TORCHSPAN_REQUIRES(mutex_);
  std::size_t active() const TORCHSPAN_REQUIRES(mutex_);

  Executor& executor_;
  const PoolOptions options_;
  mutable Mutex mutex_;
  std::deque<UniqueFunction<void()>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  Workers workers_ TORCHSPAN_GUARDED_BY(mutex_);
  Workers retired_ TORCHSPAN_GUARDED_BY(mutex_);  ///< returning from run(), to be joined
  std::unordered_map<std::thread::id, Worker*> by_thread_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<const Worker*> lookout_{nullptr};
  std::vector<Worker*> idle_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Waiter*> waiters_ TORCHSPAN_GUARDED_BY(mutex_);  ///< oldest first
  std::size_t live_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t blocked_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t started_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t max_threads_ TORCHSPAN_GUARDED_BY(mutex_);
  bool out_of_threads_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the system refused the last one
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
