#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <torchspan/pipeline/layers.h>

namespace torchspan::pipeline {

/// Counts the bytes of tensors that this thread and the backwards that it starts allocate while the watch lives, and
/// which of them are still alive. LibTorch's allocators report to it as to a profiler. Used by one thread, which also
/// destroys it, in reverse order of creation.
class AllocationWatch {
 public:
  /// Throws Error{kInvalid} if a profiler of LibTorch runs on this thread.
  AllocationWatch();

  /// Later allocations belong to `owner`.
  void begin(int owner);
  /// Bytes that belong to `owner` and were not freed.
  std::int64_t alive(int owner) const;

 private:
  class Ledger;
  explicit AllocationWatch(std::shared_ptr<Ledger> ledger);

  const std::shared_ptr<Ledger> ledger_;
  const c10::DebugInfoGuard guard_;
};

/// Removes the gradients of existing modules, and restores them and the buffers at the end of a scope.
class KeptState {
 public:
  explicit KeptState(const std::vector<BuiltLayer>& layers);
  ~KeptState();
  KeptState(const KeptState&) = delete;
  KeptState& operator=(const KeptState&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_, buffers_;
};

}  // namespace torchspan::pipeline
