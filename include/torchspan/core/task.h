#pragma once
#include <coroutine>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include <torchspan/core/future.h>

namespace torchspan {

/// Thread-local state that belongs to a coroutine rather than to the threads it visits (grad mode, the
/// autograd context). Each step of the coroutine, from one suspension to the next, runs inside run(): it
/// installs the saved state, runs the step, saves what the step left, and gives the thread its own state
/// back.
class TaskEnvironment {
 public:
  virtual ~TaskEnvironment() = default;
  virtual void run(std::coroutine_handle<> step) = 0;
};

template <class T>
class Task;

namespace task_detail {

class PromiseBase {
 public:
  struct FinalAwaiter {
    bool await_ready() noexcept { return false; }
    template <class P>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<P> handle) noexcept {
      return handle.promise().continuation_ ? handle.promise().continuation_ : std::noop_coroutine();
    }
    void await_resume() noexcept {}
  };
  std::suspend_always initial_suspend() noexcept { return {}; }
  FinalAwaiter final_suspend() noexcept { return {}; }
  void unhandled_exception() { error_ = std::current_exception(); }
  const std::shared_ptr<TaskEnvironment>& environment() const { return environment_; }

  std::coroutine_handle<> continuation_;
  std::shared_ptr<TaskEnvironment> environment_;
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

/// A coroutine that computes a T: lazy (runs when awaited or started), owned by this object, awaited at most
/// once. It may co_await futures and other tasks without holding a thread. A function that is served to other
/// workers may return one.
template <class T>
class [[nodiscard]] Task {
 public:
  using promise_type = task_detail::TaskPromise<T>;
  using value_type = T;
  using Handle = std::coroutine_handle<promise_type>;

  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool await_ready() const { return false; }
  template <class P>
  std::coroutine_handle<> await_suspend(std::coroutine_handle<P> caller) {
    handle_.promise().continuation_ = caller;
    handle_.promise().environment_ = caller.promise().environment();
    return handle_;
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

/// A coroutine that owns itself: the root under which start() runs a task.
struct Detached {
  struct promise_type {
    template <class... Args>
    explicit promise_type(std::shared_ptr<TaskEnvironment>& environment, Args&...)
        : environment_(environment) {}
    Detached get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
    const std::shared_ptr<TaskEnvironment>& environment() const { return environment_; }
    std::shared_ptr<TaskEnvironment> environment_;
  };
  std::coroutine_handle<promise_type> handle;
};

template <class T>
Detached drive([[maybe_unused]] std::shared_ptr<TaskEnvironment> environment, Task<T> task, Promise<T> promise) {
  try {
    if constexpr (std::is_void_v<T>) {
      co_await std::move(task);
      promise.set_value();
    } else {
      promise.set_value(co_await std::move(task));
    }
  } catch (...) {
    promise.set_error(std::current_exception());
  }
}

}  // namespace task_detail

/// Runs `task` on this thread up to its first suspension and gives the future of its result. `environment`
/// may be null; otherwise every step of the task runs inside it.
template <class T>
Future<T> start(Task<T> task, std::weak_ptr<FutureHost> host,
                std::shared_ptr<TaskEnvironment> environment = nullptr) {
  Promise<T> promise(std::move(host));
  Future<T> future = promise.future();
  auto root = task_detail::drive<T>(environment, std::move(task), std::move(promise));
  if (environment) {
    environment->run(root.handle);
  } else {
    root.handle.resume();
  }
  return future;
}

}  // namespace torchspan
