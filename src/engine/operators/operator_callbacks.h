#pragma once
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <torchspan/detail/core/mutex.h>

#include "engine/operators/operator_recorder.h"

namespace torchspan::engine {

/// Connects all recorders of this process with LibTorch's callbacks, which are plain functions: they find the recorders
/// here. LibTorch has callbacks only while there is a recorder. Thread-safe.
class OperatorCallbacks {
 public:
  using Recorders = std::vector<std::shared_ptr<OperatorRecorder>>;

  static OperatorCallbacks& of_process();

  void add(std::shared_ptr<OperatorRecorder> recorder);
  void remove(const std::shared_ptr<OperatorRecorder>& recorder);
  std::shared_ptr<const Recorders> recorders() const;

 private:
  OperatorCallbacks() = default;

  mutable Mutex mutex_;
  std::shared_ptr<const Recorders> recorders_ TORCHSPAN_GUARDED_BY(mutex_) = std::make_shared<Recorders>();
  at::CallbackHandle handle_ TORCHSPAN_GUARDED_BY(mutex_) = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace torchspan::engine
