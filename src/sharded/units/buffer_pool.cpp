#include "sharded/units/buffer_pool.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

namespace torchspan::sharded {

at::Tensor BufferPool::take(std::int64_t count, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(count) * options.dtype().itemsize();
  std::vector<at::Tensor> dropped;
  {
    MutexLock lock(mutex_);
    taken_ += bytes;
    most_taken_ = std::max(most_taken_, taken_);
    peak_ = std::max(peak_, taken_ + counted_);
    for (auto spare = spare_.begin(); spare != spare_.end(); ++spare) {
      if (spare->numel() != count || spare->dtype() != options.dtype() || spare->device() != options.device())
        continue;
      at::Tensor found = std::move(*spare);
      spare_.erase(spare);
      spare_bytes_ -= bytes;
      return found;
    }
    trim(dropped);
  }
  dropped.clear();
  const c10::InferenceMode normal(false);  // a later pass of training may get the tensor
  return at::empty({count}, options);
}

void BufferPool::give(at::Tensor buffer) {
  std::vector<at::Tensor> dropped;
  MutexLock lock(mutex_);
  taken_ -= buffer.nbytes();
  spare_bytes_ += buffer.nbytes();
  spare_.push_back(std::move(buffer));
  trim(dropped);
}

void BufferPool::clear() {
  std::vector<at::Tensor> dropped;
  MutexLock lock(mutex_);
  most_taken_ = taken_;
  trim(dropped);
}

void BufferPool::trim(std::vector<at::Tensor>& dropped) {
  while (!spare_.empty() && taken_ + spare_bytes_ > most_taken_) {
    spare_bytes_ -= spare_.front().nbytes();
    dropped.push_back(std::move(spare_.front()));
    spare_.erase(spare_.begin());
  }
}

void BufferPool::count(std::size_t bytes) {
  MutexLock lock(mutex_);
  counted_ += bytes;
  peak_ = std::max(peak_, taken_ + counted_);
}

void BufferPool::drop(std::size_t bytes) {
  MutexLock lock(mutex_);
  counted_ -= bytes;
}

std::size_t BufferPool::peak_bytes() const {
  MutexLock lock(mutex_);
  return peak_;
}

}  // namespace torchspan::sharded
