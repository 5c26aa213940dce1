#pragma once
#include <atomic>

#include <torchspan/detail/core/executor.h>

namespace torchspan::rpc {

/// The right to drive the transport. Unlike a mutex it may be held while its holder sleeps in the transport,
/// so nobody may wait for it in a place that the holder needs.
class DriverLock {
 public:
  bool try_take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void take(Executor& executor) {
    while (!try_take()) executor.yield();
  }
  void give() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

/// Holds it for a scope; the constructor with an executor waits for it, the other one only tries.
class DriverLockGuard {
 public:
  DriverLockGuard(DriverLock& driver_lock, Executor& executor) : driver_lock_(driver_lock), held_(true) {
    driver_lock_.take(executor);
  }
  explicit DriverLockGuard(DriverLock& driver_lock)
      : driver_lock_(driver_lock), held_(driver_lock.try_take()) {}
  ~DriverLockGuard() {
    if (held_) driver_lock_.give();
  }
  DriverLockGuard(const DriverLockGuard&) = delete;
  bool held() const { return held_; }

 private:
  DriverLock& driver_lock_;
  const bool held_;
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
};

}  // namespace torchspan::rpc
