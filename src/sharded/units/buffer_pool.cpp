#include "sharded/units/buffer_pool.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

namespace torchspan::sharded {
namespace {

constexpr std::size_t kMostSpare = 2;

}  // namespace

at::Tensor BufferPool::take(std::int64_t count, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(count) * options.dtype().itemsize();
  {
    MutexLock lock(mutex_);
    taken_ += bytes;
    peak_ = std::max(peak_, taken_);
    for (auto spare = spare_.begin(); spare != spare_.end(); ++spare) {
      if (spare->numel() != count || spare->dtype() != options.dtype() || spare->device() != options.device())
        continue;
      at::Tensor found = std::move(*spare);
      spare_.erase(spare);
      return found;
    }
  }
  return at::empty({count}, options);
}

void BufferPool::give(at::Tensor buffer) {
  at::Tensor dropped;
  MutexLock lock(mutex_);
  taken_ -= buffer.nbytes();
  spare_.push_back(std::move(buffer));
  if (spare_.size() <= kMostSpare) return;
  dropped = std::move(spare_.front());
  spare_.erase(spare_.begin());
}

std::size_t BufferPool::peak_bytes() const {
  MutexLock lock(mutex_);
  return peak_;
}

}  // namespace torchspan::sharded
