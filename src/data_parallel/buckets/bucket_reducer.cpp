#include "data_parallel/buckets/bucket_reducer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

/// Half overflows if it is summed before it is divided.
bool may_divide_last(at::ScalarType dtype) { return dtype != at::kHalf && dtype != at::kComplexHalf; }

std::string kind_of_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  const char* dtype = c10::toString(tensor.scalar_type());
  if (!tensor.is_sparse()) return fmt::format("{} elements of {}", tensor.numel(), dtype);
  return fmt::format("a sparse tensor [{}] of {}", fmt::join(tensor.sizes().vec(), ", "), dtype);
}

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

Future<at::Tensor> BucketReducer::reduce(Buckets& buckets, std::size_t bucket, const Terms& terms) const {
  at::Tensor outgoing = buckets.outgoing(bucket);
  if (!hook_) {
    const bool averages = group_averages(buckets.dtype(bucket), terms.divisor);
    return group_.all_reduce(outgoing, averages ? collective::kAvg : collective::kSum);
  }
  GradientBucket argument = hook_argument(buckets, bucket);
  argument.divisor = terms.divisor;
  argument.given_up = terms.given_up;
  argument.buffer = outgoing;
  Future<at::Tensor> work = hook_(argument, group_);
  if (!work.valid()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the communication hook returned an empty future for bucket {}", bucket));
  }
  return work;
}

void BucketReducer::check(const Buckets& buckets, std::size_t bucket, const at::Tensor& reduced) const {
  const bool sparse = buckets.sparse(bucket);
  const at::Tensor& sent = sparse ? buckets.view(buckets.parameters(bucket)[0]) : buckets.buffer(bucket);
  if (reduced.defined() && reduced.is_sparse() == sparse && reduced.scalar_type() == sent.scalar_type() &&
      (sparse ? reduced.sizes() == sent.sizes() : reduced.numel() == sent.numel())) {
    return;
  }
  throw Error(ErrorKind::kInvalid,
              fmt::format("the result of the communication hook for bucket {} is {}; it must be {}", bucket,
                          kind_of_tensor(reduced), kind_of_tensor(sent)));
}

}  // namespace torchspan::data_parallel
