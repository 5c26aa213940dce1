#pragma once
#include <atomic>
#include <optional>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::collective {

/// The first failure of a group on this rank. Any thread sets it; everything that waits for other ranks or for
/// a device checks it. Thread-safe.
class GroupFailure {
 public:
  /// Returns the first failure, which is `cause` if none was set.
  Error set(const Error& cause) {
    MutexLock lock(mutex_);
    if (!cause_) cause_ = cause;
    is_set_.store(true, std::memory_order_release);
    return *cause_;
  }
  std::optional<Error> get() const {
    if (!is_set_.load(std::memory_order_acquire)) return std::nullopt;
    MutexLock lock(mutex_);
    return cause_;
  }
  void throw_if_set() const {
    if (const auto cause = get()) throw Error(*cause);
  }

 private:
  std::atomic<bool> is_set_{false};
  mutable Mutex mutex_;
  std::optional<Error> cause_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::collective
