#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/parameter_slots.h"

namespace torchspan::data_parallel {

/// Durations of one measured round.
struct RoundTimes {
  std::uint64_t round = 0;
  Duration backward{}, communication{}, overlap{};
};

/// Counts a reducer's forwards and rounds, and keeps its statistics. Thread-safe.
class ReducerMeter {
 public:
  explicit ReducerMeter(Runtime& runtime) : runtime_(runtime) {}
  ReducerMeter(const ReducerMeter&) = delete;
  ReducerMeter& operator=(const ReducerMeter&) = delete;

  void begin_forward();
  /// The outputs of a forward that will be reduced are marked.
  void end_forward();

  /// Returns the round's number, from 1.
  std::uint64_t begin_round() { return ++rounds_; }
  std::uint64_t rounds() const { return rounds_; }
  /// Rounds that this rank has given up.
  void count_given_up() { ++given_up_; }
  std::uint64_t given_up() const { return given_up_; }
  void count_aborted();
  void count_unused();
  void count_reduction();
  std::uint64_t reductions() const;
  /// Names of parameters in the order in which their gradients arrived.
  void set_gradient_order(std::vector<std::string> names);
  void set_times(const RoundTimes& times);
  void set_buckets(const Buckets& buckets, const ParameterSlots& slots);
  void set_rebuilt();

  ReducerStats stats() const;

 private:
  Runtime& runtime_;
  std::atomic<std::uint64_t> rounds_{0}, given_up_{0};
  mutable Mutex mutex_;
  std::optional<TimePoint> forward_began_ TORCHSPAN_GUARDED_BY(mutex_);
  ReducerStats stats_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::data_parallel
