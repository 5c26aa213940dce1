#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/data_parallel/hooks.h>

namespace torchspan::data_parallel {

CommHook all_reduce_hook() {
  return [](const GradientBucket& bucket, const collective::Group& group) {
    if (bucket.buffer.is_sparse())
      return group.all_reduce(at::mul(bucket.buffer, at::Scalar(1 / bucket.divisor)));
    if (bucket.divisor != 1) bucket.buffer.mul_(1 / bucket.divisor);
    return group.all_reduce(bucket.buffer);
  };
}

}  // namespace torchspan::data_parallel
