#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/pool.h>

namespace torchspan {

Pool::Pool(Executor& executor, PoolOptions options) : executor_(executor), options_(std::move(options)) {
  if (options_.threads == 0 || options_.max_threads < options_.threads) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("pool '{}': threads = {} and max_threads = {}; at least one thread is "
                            "needed and the cap must not be below it",
                            options_.name, options_.threads, options_.max_threads));
  }
}

Pool::~Pool() { stop(); }

void Pool::post(UniqueFunction<void()> job) {
  {
    MutexLock lock(mutex_);
    if (!stopping_) {
      queue_.push_back(std::move(job));
      staff();
      return;
    }
  }
  job();
}

void Pool::staff() {
  if (queue_.empty()) return;
  const std::size_t active = live_ - blocked_ - idle_.size();
  if (active >= options_.threads) return;
  if (!idle_.empty()) {
    idle_.back()->parker->unpark();
    idle_.pop_back();
    return;
  }
  if (live_ >= options_.max_threads) return;
  auto worker = std::make_unique<Worker>();
  worker->parker = executor_.make_parker();
  Worker& self = *worker;
  // The new thread takes mutex_ before anything else, so it cannot see a half-made Worker.
  self.thread =
      executor_.spawn(fmt::format("{}/{}", options_.name, workers_.size()), [this, &self] { run(self); });
  ++live_;
  workers_.push_back(std::move(worker));
}

void Pool::run(Worker& self) {
  for (;;) {
    UniqueFunction<void()> job;
    bool sleep = false;
    {
      MutexLock lock(mutex_);
      const std::size_t active = live_ - blocked_ - idle_.size();
      if (!queue_.empty() && (active <= options_.threads || stopping_)) {
        job = std::move(queue_.front());
        queue_.pop_front();
      } else if (stopping_) {
        --live_;
        return;
      } else {
        idle_.push_back(&self);
        sleep = true;
      }
    }
    if (sleep) {
      self.parker->park(Deadline::never());
    } else {
      job();
    }
  }
}

void Pool::stop() {
  std::vector<std::unique_ptr<Worker>> workers;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    workers.swap(workers_);
    for (Worker* worker : idle_) worker->parker->unpark();
    idle_.clear();
  }
  workers.clear();
}

bool Pool::is_pool_thread() const {
  MutexLock lock(mutex_);
  return std::any_of(workers_.begin(), workers_.end(),
                     [](const auto& worker) { return worker->thread.is_current(); });
}

std::size_t Pool::thread_count() const {
  MutexLock lock(mutex_);
  return live_;
}

std::size_t Pool::queued() const {
  MutexLock lock(mutex_);
  return queue_.size();
}

void Pool::begin_blocking() {
  MutexLock lock(mutex_);
  if (live_ >= options_.max_threads && blocked_ + 1 >= live_ && !queue_.empty()) {
    throw Error(
        ErrorKind::kOverloaded,
        fmt::format("pool '{}': all {} threads wait and {} jobs are queued; raise max_threads, or wait with "
                    "co_await, which holds no thread",
                    options_.name, live_, queue_.size()));
  }
  ++blocked_;
  staff();
}

void Pool::end_blocking() {
  MutexLock lock(mutex_);
  --blocked_;
}

void Pool::wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) {
  BlockingScope blocking(*this);
  while (!done.load(std::memory_order_acquire)) {
    if (!parker.park(deadline)) return;
  }
}

Pool::BlockingScope::BlockingScope(Pool& pool) {
  if (!pool.is_pool_thread()) return;
  pool.begin_blocking();
  pool_ = &pool;
}

Pool::BlockingScope::~BlockingScope() {
  if (pool_ != nullptr) pool_->end_blocking();
}

}  // namespace torchspan
