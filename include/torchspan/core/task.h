#pragma once
// Task: coroutines that await futures. Includes no LibTorch.
#include <coroutine>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include <torchspan/core/future.h>

namespace torchspan {

/// Thread-local state that belongs to a coroutine instead of its threads (grad mode, the autograd context).
/// Each step, from one suspension to the next, runs inside run(), which installs the saved state, resumes
/// the coroutine, saves the new state and restores the thread's. The next step starts after that, on any
/// thread.
class TaskEnvironment {
 public:
  virtual ~TaskEnvironment() = default;
  virtual void run(std::coroutine_handle<> step) = 0;
};

template <class T>
class Task;

namespace task_detail {

/// Shared state of the coroutines under one start(). It resumes them in a loop, so a million awaits that
/// are ready use no stack. It subscribes to the awaited future only after the step has left the
/// environment, so the next step, on another thread, sees the complete state.
class Flow final : public std::enable_shared_from_this<Flow> {
 public:
  explicit Flow(std::shared_ptr<TaskEnvironment> environment);
  ~Flow();
  Flow(const Flow&) = delete;

  const std::shared_ptr<TaskEnvironment>& environment() const { return environment_; }
  /// Runs `first` and its successors until the flow waits for a future or has finished.
  void step(std::coroutine_handle<> first);

  /// Called in a step by the suspending coroutine: `next` runs in the same step.
  void go_on(std::coroutine_handle<> next) { next_ = next; }
  /// Called in a step by the suspending coroutine: ends the step; `handle` resumes when `future` completes.
  void resume_after(std::coroutine_handle<> handle, std::shared_ptr<FutureStateBase> future);
  /// Called in the last step: `report` runs after it, outside the environment.
  void finish(UniqueFunction<void()> report) { report_ = std::move(report); }

 private:
  struct Pump;
  static Pump make_pump(Flow& flow);
  void run_queued();

  const std::shared_ptr<TaskEnvironment> environment_;
  std::coroutine_handle<> pump_;  ///< run_queued() as a coroutine; only with an environment
  std::coroutine_handle<> next_;
  std::coroutine_handle<> waiting_;
  std::shared_ptr<FutureStateBase> awaited_;
  UniqueFunction<void()> report_;
};

/// A coroutine cannot let its thread end, because its frame is resumed on other threads: ends the process, with a message.
[[noreturn]] void thread_ended_in_coroutine();

class PromiseBase {
 public:
  struct FinalAwaiter {
    bool await_ready() noexcept { return false; }
    template <class P>
    void await_suspend(std::coroutine_handle<P> handle) noexcept {
      handle.promise().flow().go_on(handle.promise().continuation_);
    }
    void await_resume() noexcept {}
  };
  std::suspend_always initial_suspend() noexcept { return {}; }
  FinalAwaiter final_suspend() noexcept { return {}; }
  void unhandled_exception() {
    error_ = std::current_exception();
    if (!error_) thread_ended_in_coroutine();
  }
  Flow& flow() const { return *flow_; }

  std::coroutine_handle<> continuation_;
  Flow* flow_ = nullptr;
  std::exception_ptr error_;
};

template <class T>
class TaskPromise final : public PromiseBase {
 public:
  Task<T> get_return_object();
  template <class U>
  void return_value(U&& value) {
    value_.emplace(std::forward<U>(value));
  }
  T result() {
    if (error_) std::rethrow_exception(error_);
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
};

template <>
class TaskPromise<void> final : public PromiseBase {
 public:
  Task<void> get_return_object();
  void return_void() {}
  void result() {
    if (error_) std::rethrow_exception(error_);
  }
};

}  // namespace task_detail

/// A lazy coroutine that computes a T: it runs when awaited or started, is owned by this object, and is
/// awaited at most once. It may co_await futures and tasks without holding a thread. A served function may
/// return one. T may be move-only.
template <class T>
class [[nodiscard]] Task {
 public:
  using promise_type = task_detail::TaskPromise<T>;
  using value_type = T;
  using Handle = std::coroutine_handle<promise_type>;

  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    Task moved(std::move(other));
    std::swap(handle_, moved.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool await_ready() const { return false; }
  template <class P>
  void await_suspend(std::coroutine_handle<P> caller) {
    if (!handle_ || handle_.promise().continuation_) {
      throw Error(ErrorKind::kInvalid, "this task was moved away or awaited before; await a task once");
    }
    handle_.promise().continuation_ = caller;
    handle_.promise().flow_ = &caller.promise().flow();
    caller.promise().flow().go_on(handle_);
  }
  T await_resume() { return handle_.promise().result(); }

 private:
  Handle handle_;
};

namespace task_detail {

template <class T>
Task<T> TaskPromise<T>::get_return_object() {
  return Task<T>(std::coroutine_handle<TaskPromise<T>>::from_promise(*this));
}
inline Task<void> TaskPromise<void>::get_return_object() {
  return Task<void>(std::coroutine_handle<TaskPromise<void>>::from_promise(*this));
}

/// A self-owning coroutine: the root under which start() runs a task.
struct Detached {
  struct promise_type {
    template <class... Args>
    explicit promise_type(std::shared_ptr<Flow>& flow, Args&...) : flow_(flow) {}
    Detached get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
    Flow& flow() const { return *flow_; }
    std::shared_ptr<Flow> flow_;
  };
  std::coroutine_handle<promise_type> handle;
};

template <class T>
Detached drive(std::shared_ptr<Flow> flow, Task<T> task, Promise<T> promise) {
  try {
    if constexpr (std::is_void_v<T>) {
      co_await std::move(task);
      flow->finish([promise = std::move(promise)]() mutable { promise.set_value(); });
    } else {
      T value = co_await std::move(task);
      flow->finish([value = std::move(value), promise = std::move(promise)]() mutable {
        promise.set_value(std::move(value));
      });
    }
  } catch (...) {
    flow->finish([error = std::current_exception(), promise = std::move(promise)]() mutable {
      promise.set_error(std::move(error));
    });
  }
}

}  // namespace task_detail

/// Runs `task` on this thread up to its first suspension and returns the future of its result.
/// `environment` may be null; otherwise every step runs inside it, including the destruction of locals and
/// arguments. The task resumes where continuations of the awaited future run. The returned future completes
/// after the last step.
template <class T>
Future<T> start(Task<T> task, std::weak_ptr<ContinuationExecutor> continuations,
                std::shared_ptr<TaskEnvironment> environment = nullptr) {
  Promise<T> promise(std::move(continuations));
  Future<T> future = promise.future();
  auto flow = std::make_shared<task_detail::Flow>(std::move(environment));
  auto root = task_detail::drive<T>(flow, std::move(task), std::move(promise));
  flow->step(root.handle);
  return future;
}

}  // namespace torchspan
