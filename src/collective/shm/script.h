#pragma once
#include <coroutine>
#include <exception>
#include <utility>

#include "collective/shm/signals.h"

namespace torchspan::collective::shm {

/// The steps of one operation, as a coroutine that suspends where it needs counts of other ranks, so that any
/// thread may go on with it. Empty, it is finished.
class Script {
 public:
  struct promise_type {
    Wish wish;
    std::exception_ptr error;
    Script get_return_object() { return Script(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Script() = default;
  Script(Script&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Script& operator=(Script&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Script() {
    if (handle_) handle_.destroy();
  }

  /// Goes on to the next suspension; true when finished. Rethrows what a step threw.
  bool resume() {
    if (!handle_) return true;
    handle_.resume();
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return handle_.done();
  }
  /// What it waits for, while suspended.
  Wish wish() const { return handle_.promise().wish; }

 private:
  explicit Script(Handle handle) : handle_(handle) {}
  Handle handle_;
};

/// co_await Reach{signals, wish}: goes on once the wish is fulfilled.
struct Reach {
  const Signals& signals;
  Wish wish;
  bool await_ready() const { return signals.reached(wish); }
  void await_suspend(Script::Handle handle) const { handle.promise().wish = wish; }
  void await_resume() const {}
};

}  // namespace torchspan::collective::shm
