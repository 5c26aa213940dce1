#pragma once
#include <cstddef>
#include <deque>
#include <memory>

#include <torchspan/detail/core/function.h>

#include "sharded/units/buffer_pool.h"

namespace torchspan::sharded {

/// The reductions that run while backward goes on. Limits the memory of the gradients in them. Use it from one thread
/// at a time.
class ReductionQueue {
 public:
  using End = UniqueFunction<void()>;
  /// `limit`: bytes of gradients in running reductions when push() returns. `pool` counts them.
  ReductionQueue(std::size_t limit, std::shared_ptr<BufferPool> pool)
      : limit_(limit), pool_(std::move(pool)) {}

  /// Adds a reduction of `bytes`. `end` waits for it, stores its result, and frees its gradients. Ends the oldest
  /// reductions while there are more bytes than the limit.
  void push(std::size_t bytes, End end);
  void end_all();
  /// Forgets the reductions, after a failure.
  void clear();

 private:
  struct Running {
    std::size_t bytes;
    End end;
  };
  void end_oldest();

  const std::size_t limit_;
  const std::shared_ptr<BufferPool> pool_;
  std::deque<Running> running_;
  std::size_t bytes_ = 0;
};

}  // namespace torchspan::sharded
