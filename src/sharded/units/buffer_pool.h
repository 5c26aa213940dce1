#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>

namespace torchspan::sharded {

/// Flat tensors for gathered units, used again instead of freed, because fresh pages are slow. All of them together
/// never take more memory than the largest number of them that was in use. Also counts gradients. Thread-safe.
class BufferPool {
 public:
  /// A tensor of `count` elements with any content.
  at::Tensor take(std::int64_t count, const at::TensorOptions& options);
  void give(at::Tensor buffer);
  /// Frees what is not taken, and forgets how much was in use.
  void clear();
  /// Counts memory from elsewhere as taken, until drop().
  void count(std::size_t bytes);
  void drop(std::size_t bytes);
  /// Largest number of bytes that were taken or counted at the same time.
  std::size_t peak_bytes() const;

 private:
  /// Moves the oldest spare tensors to `dropped` until the rest fits; the caller frees them without the lock.
  void trim(std::vector<at::Tensor>& dropped) TORCHSPAN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<at::Tensor> spare_ TORCHSPAN_GUARDED_BY(mutex_);  // the oldest first
  std::size_t spare_bytes_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t taken_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t most_taken_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t counted_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t peak_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::sharded
