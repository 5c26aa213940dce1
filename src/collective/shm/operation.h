#pragma once
#include <coroutine>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/function.h>

#include "collective/shm/control.h"
#include "collective/shm/signals.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective::shm {

/// The steps of one operation, as a coroutine that suspends while it needs counts of other ranks. Any thread
/// may resume it. An empty one is finished.
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

  /// Runs to the next suspension; true if finished. Rethrows the exception of a step.
  bool resume() {
    if (!handle_) return true;
    handle_.resume();
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return handle_.done();
  }
  /// The count that it waits for while suspended.
  CountTarget target() const { return handle_.promise().target; }

 private:
  explicit OpCoroutine(Handle handle) : handle_(handle) {}
  Handle handle_;
};

/// co_await Reach{signals, target}: continues when the target is reached.
struct Reach {
  const Signals& signals;
  CountTarget target;
  bool await_ready() const { return signals.reached(target); }
  void await_suspend(OpCoroutine::Handle handle) const { handle.promise().target = target; }
  void await_resume() const {}
};

/// A range of memory of this process; a contribution is a sequence of them.
struct Piece {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

/// One collective operation on this rank, from the call to the completion of its future.
struct Operation {
  Call call;
  Bytes note;                 ///< shapes, written into the slot
  std::vector<Piece> pieces;  ///< this rank's contribution: call.bytes bytes
  /// Called when the calls of all ranks have arrived and agree: does what it can at once, and returns the
  /// remaining steps. Throws kInvalid for inconsistent calls.
  UniqueFunction<OpCoroutine()> begin;
  UniqueFunction<void()> succeed;
  UniqueFunction<void(std::exception_ptr)> fail;
  Deadline deadline;  ///< never: the timeout of the group
  TimePoint issued;

  CountTarget awaited = {};  ///< what the operation waits for
  TimePoint awaited_since;
  WaitWarnings warnings;
  bool begun = false;
  OpCoroutine script;
};

/// "all_reduce(float [3, 4], sum)".
std::string describe(const Call& call);
/// "all_reduce(float [3, 4], sum), call 7 of the group".
std::string describe_numbered(const Call& call);

/// Whether two ranks' calls agree, in what their verb requires to be equal. A sparse tensor without entries
/// agrees with every number of sparse dimensions.
bool agree(const Call& a, const Call& b);

}  // namespace torchspan::collective::shm
