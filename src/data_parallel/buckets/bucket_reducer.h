#pragma once
#include <cstddef>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/data_parallel/hooks.h>

#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/parameter_slots.h"

namespace torchspan::data_parallel {

/// Reduces one bucket over the ranks: with the communication hook if there is one, else with an all-reduce.
class BucketReducer {
 public:
  BucketReducer(const ParameterSlots& slots, const collective::Group& group) : slots_(slots), group_(group) {}

  /// Before the first reduction, on the thread that trains.
  void set_hook(CommHook hook) { hook_ = std::move(hook); }
  bool has_hook() const { return hook_ != nullptr; }

  /// Returns the factor that is applied to a gradient when it is copied into a bucket of `dtype`.
  double factor(at::ScalarType dtype, double divisor) const;
  struct Terms {
    double divisor = 1;
    bool given_up = false;  ///< GradientBucket::given_up
  };
  /// Starts the reduction of a bucket. Runs user code if there is a hook, which may throw.
  Future<at::Tensor> reduce(Buckets& buckets, std::size_t bucket, const Terms& terms) const;
  /// Throws Error{kInvalid} if a hook's result does not fit the bucket.
  void check(const Buckets& buckets, std::size_t bucket, const at::Tensor& reduced) const;

 private:
  /// Whether the group divides the sum.
  bool group_averages(at::ScalarType dtype, double divisor) const;
  GradientBucket hook_argument(const Buckets& buckets, std::size_t bucket) const;

  const ParameterSlots& slots_;
  const collective::Group& group_;
  CommHook hook_;
};

}  // namespace torchspan::data_parallel
