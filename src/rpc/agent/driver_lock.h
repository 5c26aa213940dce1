#pragma once
#include <atomic>

#include <torchspan/detail/core/executor.h>

namespace torchspan::rpc {

/// Grants the right to poll the transport. Unlike a mutex, it may be held while its holder sleeps in the
/// transport, so a thread must not wait for it while it holds something that the holder needs.
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

/// Holds the driver lock for a scope. The constructor with an executor waits for the lock; the other one only
/// tries.
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

/// Drives the transport while a caller waits. Thread-safe.
class Driver {
 public:
  virtual ~Driver() = default;
  /// Polls once, unless another thread polls. Returns false if another thread polls or nothing arrived.
  virtual bool drive() = 0;
  /// Registers a caller that polls; end_driving() removes it. `unserved`: what the caller waits for has not
  /// arrived.
  virtual void begin_driving() = 0;
  virtual void end_driving(bool unserved) = 0;
  /// Throws Error{kInvalid} on a thread that must not wait.
  virtual void check_may_wait() const = 0;
};

}  // namespace torchspan::rpc
