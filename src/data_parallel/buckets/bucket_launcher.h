#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>

#include "data_parallel/buckets/bucket_reducer.h"
#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/parameter_slots.h"
#include "data_parallel/rounds/round_timer.h"
#include "data_parallel/streams/reduction_stream.h"

namespace torchspan::data_parallel {

/// Launches the buckets of one round in order, each when it is full, and takes their results. Thread-safe up
/// to the last launch; nothing runs under its lock.
class BucketLauncher {
 public:
  /// What a launcher works with, besides the buckets.
  struct Parts {
    const ParameterSlots& slots;
    const BucketReducer& reducer;
    const ReductionStream& stream;
  };
  BucketLauncher(Parts parts, std::shared_ptr<Buckets> buckets, double divisor);
  BucketLauncher(const BucketLauncher&) = delete;
  BucketLauncher& operator=(const BucketLauncher&) = delete;

  /// Returns the factor of the gradients of a bucket.
  double factor(std::size_t bucket) const;
  /// Records that one more slot of the bucket has its gradient, from this thread's current stream. Calls `complete` on
  /// the thread of the last one, before the bucket counts as full.
  void filled(std::size_t bucket, const std::function<void()>& complete);
  /// Launches the buckets that are full and whose predecessors are launched.
  void launch_full(RoundTimer& timer);
  /// Makes launch_full() do nothing.
  void stop();
  /// Launches the buckets that are left, with zeros.
  void launch_zeros(RoundTimer& timer);
  /// Whether a launch failed, or a bucket must not be written to: this rank then cannot stay in step with the
  /// others.
  bool is_broken() const;
  void set_broken();

  // After the last launch:
  /// Where a hook's futures run their continuations; expired without a hook, or if it completes at once.
  std::weak_ptr<FutureHost> hook_host() const;
  const std::vector<Future<at::Tensor>>& works() const { return works_; }
  /// Throws a hook's failure, or Error{kInvalid} for a result that does not fit its bucket.
  void check_hook_results() const;
  /// Writes the reduced buckets to the buckets of all replicas, on the reduction stream. Throws the first
  /// failure of a reduction.
  void take_results();
  /// What users of the results pass; null on the CPU.
  std::shared_ptr<const ValueGate> gate() const;
  /// For the message of a failure: the first bucket that failed; empty if none did.
  std::string failed_bucket() const;

 private:
  void launch(std::size_t bucket, RoundTimer& timer);
  /// Makes this thread's current stream wait for the gradients that are in the bucket.
  void wait_for_producers(std::size_t bucket);

  const ParameterSlots& slots_;
  const BucketReducer& reducer_;
  const ReductionStream& stream_;
  const std::shared_ptr<Buckets> buckets_;
  const double divisor_;
  std::vector<Future<at::Tensor>> works_;  // by bucket
  mutable Mutex mutex_;
  std::vector<std::size_t> pending_ TORCHSPAN_GUARDED_BY(mutex_);  // by bucket: slots without a gradient
  std::vector<ProducerStreams> producers_ TORCHSPAN_GUARDED_BY(mutex_);  // by bucket
  std::size_t next_ TORCHSPAN_GUARDED_BY(mutex_) = 0;                    // the bucket that is launched next
  bool launching_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool stopped_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool broken_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::data_parallel
