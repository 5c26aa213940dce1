#pragma once
#include <cstddef>
#include <set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>

namespace torchspan::autograd {

/// Finds the parameters whose gradients LibTorch's engine put into `.grad`, and not into the context, when a
/// backward function or a hook of a distributed pass ran it, as a reentrant checkpoint does. Thread-safe.
class StrayGradients {
 public:
  /// The LibTorch state of this thread, with an observer that calls note() on the pass that the thread drives
  /// when LibTorch's engine accumulates a gradient.
  static at::ThreadLocalState watched_state();
  /// The pass of LibTorch's engine that this thread runs; null if there is none.
  static const void* engine_pass();

  /// A thread of that pass of LibTorch's engine begins to drive the distributed pass; the gradients of the
  /// former are not stray.
  void begin_inside(const void* engine_pass);
  /// Called on a thread of a pass of LibTorch's engine when one of its leaves gets its gradient.
  void note(const void* engine_pass);
  /// Takes the parameters that still exist and have a gradient; temporary leaves of backward functions do
  /// not.
  std::vector<at::Tensor> parameters();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Mutex mutex_;
  std::set<const void*> outer_ TORCHSPAN_GUARDED_BY(mutex_);
  const void* noted_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::size_t left_ TORCHSPAN_GUARDED_BY(mutex_) =
      0;  // of its leaves, those that note() was not called for yet
  std::vector<WeakTensor> leaves_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
