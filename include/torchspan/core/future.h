#pragma once
// Future and Promise: results that come later, and what runs when they are there. Includes no LibTorch.
#include <atomic>
#include <coroutine>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/owner_process.h>

namespace torchspan {

/// Stand-in for void where a value is stored.
struct Unit {
  friend bool operator==(Unit, Unit) = default;
};
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, Unit, T>;

/// Where a future's waiters wait and its continuations run, such as a worker. Thread-safe.
class ContinuationExecutor {
 public:
  virtual ~ContinuationExecutor() = default;
  virtual Executor& executor() = 0;
  /// Runs `job` on a thread that holds no lock; after the executor stopped, or if it cannot start a single
  /// thread, on the calling thread. Never throws: completing a future relies on it.
  virtual void post(UniqueFunction<void()> job) = 0;
  /// Prepares a continuation for storage; may wrap it in thread-local state of the thread that adds it.
  virtual UniqueFunction<void()> bind(UniqueFunction<void()> continuation) { return continuation; }
  /// Returns once `done` is true and `parker` was unparked, or at the deadline; may drive progress meanwhile.
  virtual void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) = 0;
  virtual std::string worker_name() const { return {}; }  ///< for errors; may be empty
};

/// Orders work on devices: a thread that takes a value passes its gate first, so that the thread's later work runs
/// after the work that computes the value. Thread-safe.
class ValueGate {
 public:
  virtual ~ValueGate() = default;
  /// Makes this thread's later work on the devices wait; does not block the thread. Throws Error if the work
  /// is known to have failed.
  virtual void pass() const = 0;
  /// Returns the gate of what this thread has computed since it passed this one.
  virtual std::shared_ptr<const ValueGate> renew() const = 0;
  /// Whether the work is finished. Throws as pass().
  virtual bool done() const = 0;
};

/// Returns a gate that combines others; null for none. Null entries are skipped.
std::shared_ptr<const ValueGate> combine_gates(std::vector<std::shared_ptr<const ValueGate>> gates);

/// Type-independent part of a future's shared state.
class FutureStateBase {
 public:
  explicit FutureStateBase(std::weak_ptr<ContinuationExecutor> continuations)
      : executor_(std::move(continuations)) {}
  virtual ~FutureStateBase();

  bool done() const { return done_.load(std::memory_order_acquire); }
  /// Throws Error{kTimedOut} if the deadline passes first.
  void wait(Deadline deadline);
  /// Returns done() after completion or at the deadline.
  bool wait_until(Deadline deadline);
  /// The deadline `timeout` from now, on the executor's clock.
  Deadline deadline_in(Duration timeout) const;
  /// Runs `continuation` once after completion: posted to the executor or, if that was destroyed, on the completing
  /// thread (on this one if already complete). It must not throw.
  void on_done(UniqueFunction<void()> continuation);
  /// on_done() with `continuation` wrapped by ContinuationExecutor::bind() on this thread.
  void on_done_bound(UniqueFunction<void()> continuation);
  const std::weak_ptr<ContinuationExecutor>& continuations() const { return executor_; }
  /// Whether the thread that may complete it is in another process: this one is a forked child.
  bool is_of_parent() const { return !process_.is_current(); }
  /// What takers of the value pass; null for most values. Call only after done().
  const std::shared_ptr<const ValueGate>& gate() const { return gate_; }
  /// Blocks until the work behind the gate is finished. Call only after done().
  void synchronize(Deadline deadline) const;

 protected:
  /// claim() reserves completion and returns false if it was reserved; publish() completes after the value
  /// is set.
  bool claim();
  void publish();
  void set_gate(std::shared_ptr<const ValueGate> gate) { gate_ = std::move(gate); }

 private:
  void check_process() const;
  const OwnerProcess process_;
  std::weak_ptr<ContinuationExecutor> executor_;
  std::shared_ptr<const ValueGate> gate_;
  Mutex mutex_;
  std::atomic<bool> claimed_{false};
  std::atomic<bool> done_{false};
  std::vector<Parker*> waiters_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<UniqueFunction<void()>> continuations_ TORCHSPAN_GUARDED_BY(mutex_);
};

template <class T>
class FutureState final : public FutureStateBase {
 public:
  using FutureStateBase::FutureStateBase;

  template <class... Args>
  bool set_value(Args&&... args) {
    if (!claim()) return false;
    try {
      value_.emplace(std::forward<Args>(args)...);
    } catch (...) {
      error_ = std::current_exception();  // already claimed: complete with this error
    }
    publish();
    return true;
  }
  /// As set_value(), for a value that takers reach through `gate`.
  template <class... Args>
  bool set_value_behind(std::shared_ptr<const ValueGate> gate, Args&&... args) {
    if (!claim()) return false;
    try {
      value_.emplace(std::forward<Args>(args)...);
      set_gate(std::move(gate));
    } catch (...) {
      error_ = std::current_exception();
    }
    publish();
    return true;
  }
  bool set_error(std::exception_ptr error) {
    if (!claim()) return false;
    error_ = std::move(error);
    publish();
    return true;
  }
  /// Call only after done().
  const Stored<T>& value() const {
    if (error_) std::rethrow_exception(error_);
    return *value_;
  }
  std::exception_ptr error() const { return error_; }

 private:
  std::optional<Stored<T>> value_;
  std::exception_ptr error_;
};

namespace future_detail {
[[noreturn]] void throw_empty();
/// The failure of a callback that called pthread_exit(), or whose thread was canceled.
std::exception_ptr thread_ended();
}  // namespace future_detail

template <class T>
class Promise;

/// A value that another thread or worker will supply, or the Error that replaces it. A cheap handle to shared state:
/// copy it freely and wait on it from any thread, any number of times. Every future of this library completes.
template <class T>
class [[nodiscard]] Future {
 public:
  using value_type = T;
  /// An empty future: all its functions but valid() throw kInvalid, and so do functions that get it.
  Future() = default;

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state().done(); }
  /// Waits for the value and returns a copy. Rethrows the failure, or throws Error{kTimedOut} after
  /// `timeout`; the future may still complete later. Do not call it while holding a lock that a handler
  /// needs.
  T wait() const { return wait(Deadline::never()); }
  T wait(Duration timeout) const { return wait(state().deadline_in(timeout)); }
  /// The same, for code that shares one deadline among several waits.
  T wait(Deadline deadline) const {
    state().wait(deadline);
    if (const auto& gate = state().gate()) gate->pass();
    if constexpr (std::is_void_v<T>) {
      state().value();
    } else {
      return state().value();
    }
  }
  /// Waits for completion, successful or not, as std::future does. Returns false if `timeout` passes first; does not
  /// throw the failure.
  bool wait_for(Duration timeout) const { return wait_until(state().deadline_in(timeout)); }
  bool wait_until(Deadline deadline) const { return state().wait_until(deadline); }
  /// Waits until the value is computed, on devices too: wait() only orders this thread's later work on the
  /// device after the value. Throws as wait().
  T synchronize(Deadline deadline = Deadline::never()) const {
    state().wait(deadline);
    state().synchronize(deadline);
    return wait(deadline);
  }
  /// What takers of a completed future's value pass; null for most values.
  const std::shared_ptr<const ValueGate>& gate() const { return state().gate(); }
  /// The failure of a completed future, or null.
  std::exception_ptr error() const { return state().error(); }
  /// Where its waiters wait and its continuations run.
  const std::weak_ptr<ContinuationExecutor>& continuations() const { return state().continuations(); }

  /// Runs `callback(Future<T>)` on a pool thread after completion, successful or not. Its result or
  /// exception completes the returned future. Runs on this thread only if the future is complete and its worker has
  /// stopped.
  template <class F>
  auto then(F callback) const -> Future<std::invoke_result_t<F&, Future<T>>>;
  /// The same for a callback without a result; an exception that it throws is lost.
  template <class F>
  void add_done_callback(F callback) const {
    static_cast<void>(then(std::move(callback)));
  }

  bool await_ready() const { return done(); }
  template <class P>
  void await_suspend(std::coroutine_handle<P> handle) const {
    handle.promise().flow().resume_after(handle, state_);
  }
  T await_resume() const { return wait(); }

 private:
  friend class Promise<T>;
  template <class U>
  friend Future<U> make_ready_future(Stored<U> value);
  template <class U>
  friend Future<U> make_failed_future(std::exception_ptr error);
  explicit Future(std::shared_ptr<FutureState<T>> state) : state_(std::move(state)) {}
  FutureState<T>& state() const {
    if (!state_) future_detail::throw_empty();
    return *state_;
  }

  std::shared_ptr<FutureState<T>> state_;
};

/// The writing end of a future. The first set_… wins and returns true. Destroying an unset promise fails
/// its future with kCancelled; a moved-from promise sets nothing. A waiter may destroy the promise as soon
/// as it has the value.
template <class T>
class Promise {
 public:
  explicit Promise(std::weak_ptr<ContinuationExecutor> continuations)
      : state_(std::make_shared<FutureState<T>>(std::move(continuations))) {}
  Promise(Promise&&) = default;
  Promise& operator=(Promise&& other) noexcept {
    Promise(std::move(other)).state_.swap(state_);  // drops the previous promise
    return *this;
  }
  ~Promise() {
    if (state_ && !state_->done() && !state_->is_of_parent()) {
      state_->set_error(std::make_exception_ptr(
          Error(ErrorKind::kCancelled, "the work behind this future was dropped before it finished")));
    }
  }

  Future<T> future() const { return Future<T>(state_); }
  template <class... Args>
  bool set_value(Args&&... args) {
    const auto state = state_;  // a waiter may destroy this promise once the value is set
    return state && state->set_value(std::forward<Args>(args)...);
  }
  /// As set_value(), for a value that a device computes: takers pass `gate`, which may be null.
  template <class... Args>
  bool set_value_behind(std::shared_ptr<const ValueGate> gate, Args&&... args) {
    const auto state = state_;
    return state && state->set_value_behind(std::move(gate), std::forward<Args>(args)...);
  }
  bool set_error(std::exception_ptr error) {
    const auto state = state_;
    return state && state->set_error(std::move(error));
  }
  bool set_error(const Error& error) { return set_error(std::make_exception_ptr(error)); }
  /// Completes with the result or exception of `body`. `passed`: a gate that `body` may have passed; the
  /// result gets its successor.
  template <class F>
  void set_from(F&& body, const std::shared_ptr<const ValueGate>& passed = nullptr) {
    try {
      if constexpr (std::is_void_v<T>) {
        body();
        passed ? set_value_behind(passed->renew()) : set_value();
      } else if (passed) {
        auto value = body();
        set_value_behind(passed->renew(), std::move(value));
      } else {
        set_value(body());
      }
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      set_error(error ? error : future_detail::thread_ended());
      if (!error) throw;
    }
  }

 private:
  std::shared_ptr<FutureState<T>> state_;
};

template <class T>
Future<T> make_ready_future(Stored<T> value = {}) {
  auto state = std::make_shared<FutureState<T>>(std::weak_ptr<ContinuationExecutor>());
  state->set_value(std::move(value));
  return Future<T>(std::move(state));
}

template <class T>
Future<T> make_failed_future(std::exception_ptr error) {
  auto state = std::make_shared<FutureState<T>>(std::weak_ptr<ContinuationExecutor>());
  state->set_error(std::move(error));
  return Future<T>(std::move(state));
}

template <class T>
template <class F>
auto Future<T>::then(F callback) const -> Future<std::invoke_result_t<F&, Future<T>>> {
  using R = std::invoke_result_t<F&, Future<T>>;
  Promise<R> promise(state().continuations());
  Future<R> result = promise.future();
  state().on_done_bound(
      [self = *this, promise = std::move(promise), callback = std::move(callback)]() mutable {
        const auto state = self.state_;
        promise.set_from([&] { return callback(std::move(self)); }, state->gate());
      });
  return result;
}

namespace future_detail {

template <class T>
using All = std::conditional_t<std::is_void_v<T>, void, std::vector<Stored<T>>>;

/// Collects results; completes with the last value or the first failure.
template <class T>
class Collector {
 public:
  Collector(std::weak_ptr<ContinuationExecutor> continuations, std::vector<Future<T>> futures)
      : promise_(std::move(continuations)), futures_(std::move(futures)), left_(futures_.size()) {}

  Future<All<T>> future() const { return promise_.future(); }
  void note(const Future<T>& done) {
    if (done.error()) promise_.set_error(done.error());
    if (left_.fetch_sub(1) == 1) deliver();
  }

 private:
  void deliver() {
    std::vector<std::shared_ptr<const ValueGate>> gates;
    for (const auto& future : futures_) gates.push_back(future.gate());
    promise_.set_from(
        [&]() -> All<T> {
          if constexpr (std::is_void_v<T>) {
            for (const auto& future : futures_) future.wait();
          } else {
            std::vector<T> values;
            values.reserve(futures_.size());
            for (const auto& future : futures_) values.push_back(future.wait());
            return values;
          }
        },
        combine_gates(std::move(gates)));
  }

  Promise<All<T>> promise_;
  const std::vector<Future<T>> futures_;
  std::atomic<std::size_t> left_;
};

}  // namespace future_detail

/// Completes with the values of all `futures`, in order (Future<void>: no value), when the last one is
/// ready, or with the first failure at once, while others still run. Awaitable. Completes at once for no
/// futures.
template <class T>
Future<future_detail::All<T>> when_all(std::vector<Future<T>> futures) {
  if (futures.empty()) return make_ready_future<future_detail::All<T>>();
  std::weak_ptr<ContinuationExecutor> continuations;
  for (const Future<T>& future : futures) {
    const std::weak_ptr<ContinuationExecutor>& its = future.continuations();
    if (continuations.expired()) continuations = its;  // futures that were created ready have none
  }
  auto collector = std::make_shared<future_detail::Collector<T>>(continuations, futures);
  for (const Future<T>& future : futures) {
    future.add_done_callback([collector](Future<T> done) { collector->note(done); });
  }
  return collector->future();
}

/// Waits for all futures and returns their values. Throws the first failure at once, or Error{kTimedOut}
/// after `timeout`; the others continue.
template <class T>
future_detail::All<T> wait_all(std::vector<Future<T>> futures) {
  return when_all(std::move(futures)).wait();
}
template <class T>
future_detail::All<T> wait_all(std::vector<Future<T>> futures, Duration timeout) {
  return when_all(std::move(futures)).wait(timeout);
}

}  // namespace torchspan
