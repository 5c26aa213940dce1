#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "data_parallel/passes/hold_count.h"
#include "data_parallel/reducer_meter.h"

namespace torchspan::data_parallel {

/// Times one round and records its spans. Measures all rounds of a traced run, else the first ten and every
/// hundredth; does nothing in the others. Thread-safe.
class RoundTimer {
 public:
  RoundTimer(Runtime& runtime, HoldCount& holds, std::uint64_t round);
  RoundTimer(const RoundTimer&) = delete;
  RoundTimer& operator=(const RoundTimer&) = delete;

  void gradient_arrived();
  void launches_begin();
  void launched(std::size_t bucket, std::uint64_t bytes, const Future<at::Tensor>& work);
  void backward_ended();
  /// Call it when all buckets are reduced. Returns nullopt if the round is not measured.
  std::optional<RoundTimes> reduced();

 private:
  Runtime& runtime_;
  HoldCount& holds_;
  const std::uint64_t round_;
  const bool measured_;
  Mutex mutex_;
  std::optional<TimePoint> first_gradient_ TORCHSPAN_GUARDED_BY(mutex_);
  TimePoint last_gradient_ TORCHSPAN_GUARDED_BY(mutex_);
  TimePoint first_launch_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<SpanScope> waiting_ TORCHSPAN_GUARDED_BY(mutex_);  ///< from the end of backward to reduced()
};

}  // namespace torchspan::data_parallel
