#pragma once
#include <atomic>

#include <torchspan/core/executor.h>
#include <torchspan/core/function.h>

namespace torchspan::rpc {

/// The right to drive the transport. Unlike a mutex it may be held while its holder sleeps in the transport,
/// so nobody may wait for it in a place that the holder needs.
class Baton {
 public:
  bool try_take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void take(Executor& executor) {
    while (!try_take()) executor.yield();
  }
  void give() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

/// Holds it for a scope; from the constructor with an executor it waits for it.
class BatonHold {
 public:
  BatonHold(Baton& baton, Executor& executor) : baton_(baton) { baton_.take(executor); }
  ~BatonHold() { baton_.give(); }
  BatonHold(const BatonHold&) = delete;

 private:
  Baton& baton_;
};

/// What drives the transport while a caller waits. Thread-safe.
class Driver {
 public:
  virtual ~Driver() = default;
  /// Polls once if nobody else does; false when that brought nothing, or when somebody does.
  virtual bool drive() = 0;
  /// A caller begins to drive, and gives up: `unserved` when what it waits for has not come.
  virtual void begin_driving() = 0;
  virtual void end_driving(bool unserved) = 0;
  /// Throws Error{kInvalid} on the thread that must never wait.
  virtual void check_may_wait() const = 0;
  /// `continuation`, wrapped in what interceptors keep for this thread outside handlers.
  virtual UniqueFunction<void()> bind_to_thread(UniqueFunction<void()> continuation) = 0;
};

}  // namespace torchspan::rpc
