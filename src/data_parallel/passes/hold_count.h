#pragma once
#include <cstddef>
#include <memory>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::data_parallel {

/// Counts the continuations on a group's threads that use a reducer, so that its destructor can wait for
/// them. Without this, a thread of the group could drop the last handle of the group, which must not happen
/// there. Thread-safe.
class HoldCount {
 public:
  /// Counts as one until its last copy is destroyed.
  using Hold = std::shared_ptr<void>;

  explicit HoldCount(Executor& executor) : executor_(executor) {}
  HoldCount(const HoldCount&) = delete;
  HoldCount& operator=(const HoldCount&) = delete;

  Hold take();
  /// Waits until no hold is left; on one thread at a time.
  void wait();

 private:
  void release();

  Executor& executor_;
  Mutex mutex_;
  std::size_t count_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Parker* waiter_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace torchspan::data_parallel
