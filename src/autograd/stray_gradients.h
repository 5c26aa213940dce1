#pragma once
#include <cstddef>
#include <set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>

namespace torchspan::autograd {

/// The parameters whose gradients LibTorch's engine put into `.grad` while a backward function or a hook of a
/// distributed pass ran it, as a reentrant checkpoint does: the context does not have them. Thread-safe.
class StrayGradients {
 public:
  /// The LibTorch state of this thread, with an observer: in it the pass that the thread drives is told what
  /// LibTorch's engine accumulates.
  static at::ThreadLocalState watched_state();
  /// The pass of LibTorch's engine that this thread is in; null outside.
  static const void* engine_pass();

  /// A thread of that pass of LibTorch's engine begins to drive the distributed one, which is none of it.
  void begin_inside(const void* engine_pass);
  /// On a thread of a pass of LibTorch's engine, as a leaf of it gets its gradient.
  void note(const void* engine_pass);
  /// Those that live on with a gradient. What backward functions made for themselves does not.
  std::vector<at::Tensor> parameters();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Mutex mutex_;
  std::set<const void*> outer_ TORCHSPAN_GUARDED_BY(mutex_);
  const void* noted_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::size_t left_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  // leaves of that pass which are still to be told
  std::vector<WeakTensor> leaves_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
