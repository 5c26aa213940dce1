#include "data_parallel/buckets/bucket_reducer.h"

#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

/// Half overflows if it is summed before it is divided.
bool may_divide_last(at::ScalarType dtype) { return dtype != at::kHalf && dtype != at::kComplexHalf; }

}  // namespace

bool BucketReducer::group_averages(at::ScalarType dtype, double divisor) const {
  return !hook_ && divisor == group_.size() && may_divide_last(dtype);
}

double BucketReducer::factor(at::ScalarType dtype, double divisor) const {
  return hook_ || group_averages(dtype, divisor) ? 1 : 1 / divisor;
}

GradientBucket BucketReducer::hook_argument(const Buckets& buckets, std::size_t bucket) const {
  GradientBucket argument;
  argument.index = bucket;
  argument.is_last = bucket + 1 == buckets.size();
  for (const std::size_t parameter : buckets.parameters(bucket)) {
    argument.gradients.push_back(buckets.view(parameter));
    argument.parameters.push_back(slots_.name(parameter));
    argument.parameter_tensors.push_back(slots_.tensor(parameter));
  }
  return argument;
}

Future<at::Tensor> BucketReducer::reduce(Buckets& buckets, std::size_t bucket, double divisor) const {
  at::Tensor outgoing = buckets.outgoing(bucket);
  if (!hook_) {
    const bool averages = group_averages(buckets.dtype(bucket), divisor);
    return group_.all_reduce(outgoing, averages ? collective::kAvg : collective::kSum);
  }
  GradientBucket argument = hook_argument(buckets, bucket);
  argument.divisor = divisor;
  argument.buffer = outgoing;
  Future<at::Tensor> work = hook_(argument, group_);
  if (!work.valid()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the communication hook returned an empty future for bucket {}", bucket));
  }
  return work;
}

void BucketReducer::check(const Buckets& buckets, std::size_t bucket, const at::Tensor& reduced) const {
  if (buckets.sparse(bucket)) return;
  const at::Tensor& sent = buckets.buffer(bucket);
  if (reduced.defined() && reduced.numel() == sent.numel() && reduced.is_sparse() == sent.is_sparse() &&
      reduced.scalar_type() == sent.scalar_type()) {
    return;
  }
  throw Error(
      ErrorKind::kInvalid,
      fmt::format(
          "the result of the communication hook for bucket {} is {}; it must be {} elements of {}", bucket,
          reduced.defined()
              ? fmt::format("{} elements of {}", reduced.numel(), c10::toString(reduced.scalar_type()))
              : "an undefined tensor",
          sent.numel(), c10::toString(sent.scalar_type())));
}

}  // namespace torchspan::data_parallel
