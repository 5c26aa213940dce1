#include "data_parallel/buckets/buckets.h"

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

/// A tensor without entries, with the dimensions of an embedding's gradient: sparse rows of dense values.
at::Tensor empty_sparse(const at::Tensor& like) {
  const std::int64_t sparse_dim = std::min<std::int64_t>(like.dim(), 1);
  return at::_sparse_coo_tensor_with_dims(sparse_dim, like.dim() - sparse_dim, like.sizes(),
                                          like.options().layout(at::kSparse).requires_grad(false));
}

std::vector<std::int64_t> row_major(at::IntArrayRef sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<std::int64_t>(sizes[i], 1);
  }
  return strides;
}

/// The part of `buffer` at `offset`, with the parameter's strides if they leave no gaps. Autograd does not
/// know it as a view, because optimizers detach gradients in place.
at::Tensor part_of(const at::Tensor& buffer, std::int64_t offset, const at::Tensor& parameter) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto strides =
      parameter.is_non_overlapping_and_dense() ? parameter.strides().vec() : row_major(parameter.sizes());
  return at::as_strided(buffer, parameter.sizes(), strides, buffer.storage_offset() + offset);
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace

Buckets::Buckets(const std::vector<std::vector<Parameter>>& replicas, const BucketAssignment& assignment,
                 const collective::Group& group)
    : bucket_of_(replicas[0].size()),
      views_(replicas.size() * replicas[0].size()),
      replicas_(replicas.size()) {
  const at::NoGradGuard no_grad;
  for (const auto& replica : replicas) {
    for (const Parameter& parameter : replica) likes_.push_back(parameter.tensor);
  }
  for (const auto& parameters : assignment.buckets) add(replicas, parameters, group);
}

void Buckets::add(const std::vector<std::vector<Parameter>>& replicas,
                  const std::vector<std::size_t>& parameters, const collective::Group& group) {
  Bucket bucket;
  bucket.parameters = parameters;
  const Parameter& first = replicas[0][parameters[0]];
  bucket.dtype = first.tensor.scalar_type();
  bucket.sparse = first.sparse_gradient;
  std::int64_t count = 0;
  for (const std::size_t parameter : parameters) {
    bucket_of_[parameter] = buckets_.size();
    count += likes_[parameter].numel();
  }
  bucket.bytes = static_cast<std::size_t>(count) * first.tensor.element_size();
  for (std::size_t replica = 0; replica < replicas_ && !bucket.sparse; ++replica) {
    const at::Tensor& like = replicas[replica][parameters[0]].tensor;
    at::Tensor buffer = like.is_cpu() ? group.allocate({count}, bucket.dtype)
                                      : at::empty({count}, like.options().requires_grad(false));
    buffer.zero_();
    std::int64_t offset = 0;
    for (const std::size_t parameter : parameters) {
      const std::size_t slot = replica * bucket_of_.size() + parameter;
      views_[slot] = part_of(buffer, offset, likes_[slot]);
      offset += likes_[slot].numel();
    }
    bucket.buffers.push_back(std::move(buffer));
  }
  buckets_.push_back(std::move(bucket));
}

bool Buckets::holds(std::size_t slot, const at::Tensor& gradient) const {
  const at::Tensor& view = views_[slot];
  if (!view.defined() || !gradient.defined() || gradient.is_sparse()) return false;
  return view.unsafeGetTensorImpl() == gradient.unsafeGetTensorImpl() || same_memory(view, gradient);
}

bool Buckets::fits(std::size_t slot) const {
  const at::Tensor& like = likes_[slot];
  const Bucket& bucket = buckets_[bucket_of(slot)];
  if (like.scalar_type() != bucket.dtype) return false;
  return bucket.sparse || (like.sizes() == views_[slot].sizes() && like.device() == views_[slot].device());
}

void Buckets::check(std::size_t slot, const at::Tensor& gradient) const {
  const at::Tensor& view = views_[slot];
  const bool sparse = buckets_[bucket_of(slot)].sparse;
  if (sparse != gradient.is_sparse()) {
    throw Error(ErrorKind::kInvalid,
                sparse
                    ? "it got a dense gradient, but was declared to have a sparse one"
                    : "it got a sparse gradient; name it in sparse_parameters, or make its embedding dense");
  }
  if (!sparse && (gradient.scalar_type() != view.scalar_type() || gradient.sizes() != view.sizes())) {
    throw Error(ErrorKind::kInvalid,
                "its gradient does not have the dtype or shape that the parameter had when it was wrapped; "
                "convert the module before it is wrapped");
  }
}

bool Buckets::put(std::size_t slot, const at::Tensor& gradient, double factor) {
  if (!gradient.defined()) {
    put_nothing(slot);
    return false;
  }
  check(slot, gradient);
  at::Tensor& view = views_[slot];
  if (buckets_[bucket_of(slot)].sparse) {
    view = factor == 1 ? gradient : at::mul(gradient, at::Scalar(factor));
    return false;
  }
  if (holds(slot, gradient)) {
    if (factor != 1) view.mul_(factor);
    return true;
  }
  view.copy_(gradient);
  if (factor != 1) view.mul_(factor);
  return false;
}

void Buckets::put_nothing(std::size_t slot) {
  if (buckets_[bucket_of(slot)].sparse) {
    views_[slot] = empty_sparse(likes_[slot]);
  } else {
    views_[slot].zero_();
  }
}

at::Tensor Buckets::outgoing(std::size_t bucket) {
  Bucket& chosen = buckets_[bucket];
  if (!chosen.sparse) {
    for (std::size_t replica = 1; replica < replicas_; ++replica)
      chosen.buffers[0].add_(chosen.buffers[replica]);
    return chosen.buffers[0];
  }
  at::Tensor sum = views_[chosen.parameters[0]];
  for (std::size_t replica = 1; replica < replicas_; ++replica) {
    sum = sum + views_[replica * bucket_of_.size() + chosen.parameters[0]];
  }
  return sum;
}

void Buckets::take(std::size_t bucket, const at::Tensor& reduced) {
  Bucket& chosen = buckets_[bucket];
  if (chosen.sparse) {
    for (std::size_t replica = 0; replica < replicas_; ++replica) {
      views_[replica * bucket_of_.size() + chosen.parameters[0]] = replica == 0 ? reduced : reduced.clone();
    }
    return;
  }
  for (at::Tensor& buffer : chosen.buffers) {
    if (!same_memory(buffer, reduced)) buffer.copy_(reduced.reshape_as(buffer));
  }
}

}  // namespace torchspan::data_parallel
