#include <algorithm>
#include <cxxabi.h>
#include <fmt/format.h>

#include <torchspan/detail/core/pool.h>

#include "core/api/throw_invalid.h"

namespace torchspan {
Pool::Pool(Executor& executor, PoolOptions options)
    : executor_(executor), options_(std::move(options)), max_threads_(options_.max_threads) {
  if (options_.threads == 0 || options_.max_threads < options_.threads) {
    throw_invalid(
        "pool '{}': threads = {} and max_threads = {}; at least one thread is needed and the cap must not be "
        "below it",
        options_.name, options_.threads, options_.max_threads);
  }
}

Pool::~Pool() { stop(); }

void Pool::post(UniqueFunction<void()> job) {
  if (!process_.is_current()) return keep_until_exit(new UniqueFunction<void()>(std::move(job)));
  {
    MutexLock lock(mutex_);
    if (!stopping_) {
      queue_.push_back(std::move(job));
      wake_or_add_worker();
      if (live_ > 0) {
        if (starved() && !waiters_.empty()) {
          waiters_.back()->overloaded.store(true, std::memory_order_release);
          waiters_.back()->parker.unpark();
        }
        return;
      }
      job = std::move(queue_.back());
      queue_.pop_back();
    }
  }
  job();
}

void Pool::wake_or_add_worker() {
  if (queue_.empty() || active() >= options_.threads) return;
  if (!idle_.empty()) {
    auto chosen = std::find(idle_.begin(), idle_.end(), spinning_.load());
    if (chosen == idle_.end()) --chosen;
    (*chosen)->idle.store(false, std::memory_order_release);
    if (spinning_.load() != *chosen) (*chosen)->parker->unpark();
    idle_.erase(chosen);
  } else if (live_ < max_threads_) {
    add_worker();
  }
}

void Pool::allow_threads(std::ptrdiff_t more) {
  if (!process_.is_current()) return;
  MutexLock lock(mutex_);
  max_threads_ += static_cast<std::size_t>(more);
  if (more > 0) wake_or_add_worker();
}

void Pool::add_worker() {
  workers_.push_back(std::make_unique<Worker>());
  Worker& self = *workers_.back();
  try {
    self.parker = executor_.make_parker();
    // The new thread takes mutex_ first, so it cannot see a half-constructed Worker.
    self.thread =
        executor_.spawn(fmt::format("{}/{}", options_.name, started_), [this, &self] { run(self); });
  } catch (const Error&) {
    workers_.pop_back();
    out_of_threads_ = true;
    return;
  }
  out_of_threads_ = false;
  ++started_;
  ++live_;
}

void Pool::run(Worker& self) {
  {
    MutexLock lock(mutex_);
    by_thread_[std::this_thread::get_id()] = &self;
  }
  for (;;) {
    Workers ended;
    UniqueFunction<void()> job;
    Deadline rest_until;
    {
      MutexLock lock(mutex_);
      ended.swap(retired_);
      job = next_job();
      if (!job) {
        if (stopping_) return retire(self);
        if (idle_.size() >= options_.threads) rest_until = executor_.deadline_in(options_.linger);
        self.idle = true;
        idle_.push_back(&self);
      }
    }
    ended.clear();
    if (job) {
      try {
        job();
      } catch (
          abi::__forced_unwind&) {  // by pthread_exit(): nothing may stop it, and another thread takes over
        MutexLock lock(mutex_);
        retire(self);
        wake_or_add_worker();
        throw;
      }
      process_.end_child(options_.name);
    } else if (!rest(self, rest_until)) {
      return;
    }
  }
}

UniqueFunction<void()> Pool::next_job() {
  if (queue_.empty() || active() > options_.threads) return {};
  UniqueFunction<void()> job = std::move(queue_.front());
  queue_.pop_front();
  return job;
}

void Pool::spin(const Worker& self) {
  const Duration limit = executor_.spin_limit();
  const Worker* none = nullptr;
  if (limit == Duration::zero() || !spinning_.compare_exchange_strong(none, &self)) return;
  const TimePoint end = executor_.now() + limit;
  while (self.idle.load(std::memory_order_acquire) && executor_.now() < end &&
         executor_.spin_limit() != Duration::zero()) {
    executor_.yield();
  }
  spinning_.store(nullptr);
}

bool Pool::rest(Worker& self, Deadline deadline) {
  spin(self);
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (!self.idle) return true;
    }
    const bool unparked = self.parker->park(deadline);
    MutexLock lock(mutex_);
    if (!self.idle) return true;
    if (unparked) continue;  // by a wake-up that a timeout had already seen
    self.idle = false;
    std::erase(idle_, &self);
    retire(self);  // it is not needed: wake_or_add_worker() wakes an idle thread before a job has to wait
    return false;
  }
}

void Pool::retire(Worker& self) {
  --live_;
  by_thread_.erase(std::this_thread::get_id());
  const auto own = std::find_if(workers_.begin(), workers_.end(),
                                [&self](const auto& worker) { return worker.get() == &self; });
  if (own == workers_.end()) return;  // stop() waits for this thread
  retired_.push_back(std::move(*own));
  workers_.erase(own);
}

void Pool::stop() {
  if (!process_.is_current()) return;
  for (;;) {
    Workers ended;
    MutexLock lock(mutex_);
    if (this_worker() != nullptr) {
      throw_invalid(
          "pool '{}' is stopped or destroyed by one of its own threads, which cannot wait for itself; stop "
          "it from the thread that owns it",
          options_.name);
    }
    stopping_ = true;
    for (Worker* worker : idle_) {
      worker->idle = false;
      worker->parker->unpark();
    }
    idle_.clear();
    ended.swap(retired_);
    if (!workers_.empty()) {
      ended.push_back(std::move(workers_.back()));
      workers_.pop_back();
    }
    if (ended.empty()) return;
  }
}

Pool::Worker* Pool::this_worker() const {
  const auto found = by_thread_.find(std::this_thread::get_id());
  return found == by_thread_.end() ? nullptr : found->second;
}

std::size_t Pool::active() const { return live_ - blocked_ - idle_.size(); }

bool Pool::is_pool_thread() const {
  if (!process_.is_current()) return false;
  MutexLock lock(mutex_);
  return this_worker() != nullptr;
}

std::size_t Pool::thread_count() const {
  MutexLock lock(mutex_);
  return live_;
}

bool Pool::busy() const {
  MutexLock lock(mutex_);
  return !queue_.empty() || live_ > idle_.size();
}

std::size_t Pool::queued() const {
  MutexLock lock(mutex_);
  return queue_.size();
}

bool Pool::starved() const {
  if (queue_.empty() || blocked_ < live_) return false;
  if (live_ < max_threads_ && !out_of_threads_) return false;
  return std::none_of(waiters_.begin(), waiters_.end(), [](const Waiter* waiter) {
    return waiter->overloaded.load(std::memory_order_relaxed) || waiter->done.load(std::memory_order_relaxed);
  });
}

Error Pool::overloaded() const {
  return Error(
      ErrorKind::kOverloaded,
      fmt::format("pool '{}': all {} threads wait and {} jobs are queued; raise max_threads{}, or wait "
                  "with co_await, which holds no thread",
                  options_.name, live_, queue_.size(),
                  out_of_threads_ ? " and the system's limit on threads" : ""));
}

Pool::Worker* Pool::begin_blocking(Waiter* waiter) {
  process_.check();
  MutexLock lock(mutex_);
  Worker* self = this_worker();
  if (self == nullptr) return nullptr;
  if (++self->scopes == 1) ++blocked_;
  if (waiter != nullptr) waiters_.push_back(waiter);
  wake_or_add_worker();
  if (starved()) {
    leave(*self, waiter);
    throw overloaded();
  }
  return self;
}

void Pool::end_blocking(Worker& self, Waiter* waiter) {
  if (!process_.is_current()) return;
  MutexLock lock(mutex_);
  leave(self, waiter);
}

void Pool::leave(Worker& self, Waiter* waiter) {
  if (--self.scopes == 0) --blocked_;
  if (waiter != nullptr) std::erase(waiters_, waiter);
}

void Pool::wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) {
  if (done.load(std::memory_order_acquire)) return;
  Waiter waiter{parker, done};
  Worker* self = begin_blocking(&waiter);
  bool overloaded = false;
  while (!done.load(std::memory_order_acquire) && !overloaded) {
    if (!parker.park(deadline)) break;
    overloaded = waiter.overloaded.load(std::memory_order_acquire);
  }
  if (self == nullptr) return;
  MutexLock lock(mutex_);
  leave(*self, &waiter);
  if (overloaded && !done.load(std::memory_order_acquire)) throw this->overloaded();
}

}  // namespace torchspan
