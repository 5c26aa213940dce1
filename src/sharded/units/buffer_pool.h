#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>

namespace torchspan::sharded {

/// Flat tensors for gathered units, used again instead of freed, because fresh pages are slow. Keeps at most two that
/// nobody uses. Thread-safe.
class BufferPool {
 public:
  /// A tensor of `count` elements with any content.
  at::Tensor take(std::int64_t count, const at::TensorOptions& options);
  void give(at::Tensor buffer);
  /// Largest number of bytes that were taken at the same time.
  std::size_t peak_bytes() const;

 private:
  mutable Mutex mutex_;
  std::vector<at::Tensor> spare_ TORCHSPAN_GUARDED_BY(mutex_);  // the oldest first
  std::size_t taken_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t peak_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::sharded
