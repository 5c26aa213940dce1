#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/buckets/bucket_launcher.h"
#include "data_parallel/buckets/buckets.h"
#include "data_parallel/reducer_parts.h"
#include "data_parallel/rounds/gradient_transfer.h"
#include "data_parallel/rounds/round_timer.h"

namespace torchspan::data_parallel {

/// Collects the gradients of one round: each slot gets one, into its bucket, and full buckets are launched.
/// Thread-safe; nothing runs under its lock.
class RoundGradients {
 public:
  /// `in_place`: gradients become views of buckets.
  RoundGradients(ReducerParts& parts, double divisor, bool in_place);
  RoundGradients(const RoundGradients&) = delete;
  RoundGradients& operator=(const RoundGradients&) = delete;

  std::uint64_t round() const { return round_; }
  /// Reserves the slot for its gradient. Throws Error{kInvalid} if it has one.
  void accept(std::size_t slot);
  /// Puts an accepted gradient into its bucket.
  void fill(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient);
  /// Fills a slot that the pass does not use, unless it is accepted.
  void fill_unused(engine::GradientSink& sink, std::size_t slot);
  /// Copies the gradients that buckets have so far: the program may change them when the pass is over.
  void copy_delayed(engine::GradientSink& sink);
  void launch_full() { launcher_->launch_full(*timer_); }
  void launch_zeros() { launcher_->launch_zeros(*timer_); }
  /// Slots that are not accepted.
  std::vector<std::size_t> missing() const;
  /// Parameters of the first replica in the order in which they were accepted.
  std::vector<std::uint32_t> order() const;

  const std::shared_ptr<BucketLauncher>& launcher() const { return launcher_; }
  const std::shared_ptr<RoundTimer>& timer() const { return timer_; }
  GradientTransfer& transfer() { return transfer_; }

 private:
  ReducerParts& parts_;
  const std::uint64_t round_;
  const std::shared_ptr<Buckets> buckets_;
  const std::shared_ptr<BucketLauncher> launcher_;
  const std::shared_ptr<RoundTimer> timer_;
  GradientTransfer transfer_;
  mutable Mutex mutex_;
  std::vector<std::uint8_t> accepted_ TORCHSPAN_GUARDED_BY(mutex_);  // by slot
  std::vector<std::uint32_t> order_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::data_parallel
