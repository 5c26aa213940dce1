#pragma once
#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

#include <torchspan/core/future.h>

namespace torchspan::rpc {

/// The calls made through one WaitScope. Thread-safe.
class CallGroup {
 public:
  explicit CallGroup(std::weak_ptr<ContinuationExecutor> continuations)
      : continuations_(std::move(continuations)) {}
  template <class T>
  static void track(const std::shared_ptr<CallGroup>& group, const Future<T>& call) {
    group->begin();
    call.add_done_callback([group](Future<T> done) { group->end(done.error()); });
  }
  /// Completes when no call is pending, or fails with the first failure.
  Future<void> settled();
  /// Completes when no call is pending, regardless of failures.
  Future<void> all_ended();

 private:
  void begin();
  void end(std::exception_ptr error);

  using Promises = std::vector<Promise<void>>;
  const std::weak_ptr<ContinuationExecutor> continuations_;
  Mutex mutex_;
  std::size_t out_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ TORCHSPAN_GUARDED_BY(mutex_);
  Promises settled_ TORCHSPAN_GUARDED_BY(mutex_);
  Promises all_ended_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
