#pragma once
#include <coroutine>
#include <exception>
#include <utility>

#include "collective/shm/signals.h"

namespace torchspan::collective::shm {

/// The steps of one operation, as a coroutine that suspends when it needs counts of other ranks, so that any
/// thread may resume it. An empty one is finished.
class OpCoroutine {
 public:
  struct promise_type {
    CountTarget target;
    std::exception_ptr error;
    OpCoroutine get_return_object() { return OpCoroutine(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  OpCoroutine() = default;
  OpCoroutine(OpCoroutine&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  OpCoroutine& operator=(OpCoroutine&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~OpCoroutine() {
    if (handle_) handle_.destroy();
  }

  /// Resumes until the next suspension; returns true when finished. Rethrows what a step throws.
  bool resume() {
    if (!handle_) return true;
    handle_.resume();
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return handle_.done();
  }
  /// The count that it waits for, while suspended.
  CountTarget target() const { return handle_.promise().target; }

 private:
  explicit OpCoroutine(Handle handle) : handle_(handle) {}
  Handle handle_;
};

/// co_await Reach{signals, target}: resumes when the target is reached.
struct Reach {
  const Signals& signals;
  CountTarget target;
  bool await_ready() const { return signals.reached(target); }
  void await_suspend(OpCoroutine::Handle handle) const { handle.promise().target = target; }
  void await_resume() const {}
};

}  // namespace torchspan::collective::shm
