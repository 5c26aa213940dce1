#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel {
namespace {

/// A copy of the bucket with its gradients in another dtype.
GradientBucket narrowed(const GradientBucket& bucket, const collective::Group& group, at::ScalarType dtype) {
  GradientBucket narrow = bucket;
  const auto size = bucket.buffer.numel();
  narrow.buffer = bucket.buffer.is_cpu() ? group.allocate({size}, dtype)
                                         : at::empty({size}, bucket.buffer.options().dtype(dtype));
  narrow.buffer.copy_(bucket.buffer);
  for (at::Tensor& gradient : narrow.gradients) {
    const auto offset = gradient.storage_offset() - bucket.buffer.storage_offset();
    gradient = at::as_strided(narrow.buffer, gradient.sizes(), gradient.strides(),
                              narrow.buffer.storage_offset() + offset);
  }
  return narrow;
}

CommHook compressing(CommHook inner, at::ScalarType dtype) {
  return [inner = std::move(inner), dtype](const GradientBucket& bucket, const collective::Group& group) {
    const at::ScalarType wide = bucket.buffer.scalar_type();
    if (bucket.buffer.is_sparse() || (wide != at::kFloat && wide != at::kDouble)) return inner(bucket, group);
    return inner(narrowed(bucket, group, dtype), group)
        .then([buffer = bucket.buffer](const Future<at::Tensor>& reduced) {
          const at::NoGradGuard no_grad;
          buffer.copy_(reduced.wait().reshape_as(buffer));
          return buffer;
        });
  };
}

}  // namespace

CommHook all_reduce_hook() {
  return [](const GradientBucket& bucket, const collective::Group& group) {
    if (bucket.buffer.is_sparse())
      return group.all_reduce(at::mul(bucket.buffer, at::Scalar(1 / bucket.divisor)));
    if (bucket.divisor != 1) bucket.buffer.mul_(1 / bucket.divisor);
    return group.all_reduce(bucket.buffer);
  };
}

CommHook fp16_compress_wrapper(CommHook inner) { return compressing(std::move(inner), at::kHalf); }
CommHook bf16_compress_wrapper(CommHook inner) { return compressing(std::move(inner), at::kBFloat16); }
CommHook fp16_compress_hook() { return fp16_compress_wrapper(all_reduce_hook()); }
CommHook bf16_compress_hook() { return bf16_compress_wrapper(all_reduce_hook()); }

}  // namespace torchspan::data_parallel
