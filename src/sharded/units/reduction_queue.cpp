#include "sharded/units/reduction_queue.h"

#include <utility>

namespace torchspan::sharded {

void ReductionQueue::push(std::size_t bytes, End end) {
  running_.push_back({bytes, std::move(end)});
  bytes_ += bytes;
  pool_->count(bytes);
  while (bytes_ > limit_) end_oldest();
}

void ReductionQueue::end_oldest() {
  Running oldest = std::move(running_.front());
  running_.pop_front();
  bytes_ -= oldest.bytes;
  oldest.end();
  oldest.end = nullptr;
  pool_->drop(oldest.bytes);
}

void ReductionQueue::end_all() {
  while (!running_.empty()) end_oldest();
}

void ReductionQueue::clear() {
  pool_->drop(bytes_);
  bytes_ = 0;
  running_.clear();
}

}  // namespace torchspan::sharded
