#include "data_parallel/buckets.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

struct OpenBucket {
  std::vector<std::size_t> indices;
  std::size_t bytes = 0;
  std::size_t limit = 0;  // which of the limits
};

void check_assignment(const std::vector<at::Tensor>& tensors, const std::vector<std::size_t>& limits,
                      const AssignmentOptions& options) {
  const auto refuse = [](const std::string& text) { throw_invalid(text); };
  if (tensors.empty()) refuse("there are no tensors to put into buckets");
  if (limits.empty()) refuse("there is no size limit for buckets; give at least one");
  if (!options.sparse.empty() && options.sparse.size() != tensors.size()) {
    refuse(fmt::format("{} sparse flags for {} tensors", options.sparse.size(), tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) refuse(fmt::format("tensor {} is undefined", i));
    if (tensors[i].is_sparse())
      refuse(fmt::format("tensor {} is sparse; only its gradient may be sparse", i));
  }
  if (options.order.empty()) return;
  std::vector<bool> seen(tensors.size());
  for (const std::size_t index : options.order) {
    if (index >= tensors.size() || seen[index]) {
      refuse(
          fmt::format("the order of {} tensors has index {} twice or out of range", tensors.size(), index));
    }
    seen[index] = true;
  }
  if (options.order.size() != tensors.size()) {
    refuse(fmt::format("the order has {} indices for {} tensors", options.order.size(), tensors.size()));
  }
}

void sort_by_smallest_index(BucketAssignment& assignment) {
  std::vector<std::size_t> places(assignment.buckets.size());
  std::iota(places.begin(), places.end(), 0U);
  const auto smallest = [&](std::size_t place) {
    const auto& bucket = assignment.buckets[place];
    return *std::min_element(bucket.begin(), bucket.end());
  };
  std::sort(places.begin(), places.end(),
            [&](std::size_t a, std::size_t b) { return smallest(a) < smallest(b); });
  BucketAssignment sorted;
  for (const std::size_t place : places) {
    sorted.buckets.push_back(std::move(assignment.buckets[place]));
    sorted.limits.push_back(assignment.limits[place]);
  }
  assignment = std::move(sorted);
}

constexpr double kMebibyte = 1024.0 * 1024.0;

/// Bytes by bucket, in the order of reduction.
std::vector<std::size_t> limits_of(const DataParallelOptions& options) {
  std::vector<double> mebibytes = options.bucket_cap_mb_list;
  if (mebibytes.empty()) mebibytes = {options.first_bucket_mb, options.bucket_cap_mb};
  std::vector<std::size_t> limits;
  for (const double size : mebibytes)
    limits.push_back(std::max<std::size_t>(static_cast<std::size_t>(size * kMebibyte), 1));
  return limits;
}

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

BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& limits,
                                                   const AssignmentOptions& options) {
  check_assignment(tensors, limits, options);
  using Kind = std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>;
  std::map<Kind, OpenBucket> open;
  BucketAssignment assignment;
  const auto close = [&](OpenBucket& bucket) {
    assignment.buckets.push_back(std::exchange(bucket.indices, {}));
    assignment.limits.push_back(limits[bucket.limit]);
    bucket.limit = std::min(bucket.limit + 1, limits.size() - 1);
    bucket.bytes = 0;
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t index = options.order.empty() ? i : options.order[i];
    if (!options.sparse.empty() && options.sparse[index]) {
      assignment.buckets.push_back({index});
      assignment.limits.push_back(0);
      continue;
    }
    const at::Tensor& tensor = tensors[index];
    OpenBucket& bucket = open[{tensor.scalar_type(), tensor.device().type(), tensor.device().index()}];
    bucket.indices.push_back(index);
    bucket.bytes += tensor.nbytes();
    if (bucket.bytes >= limits[bucket.limit]) close(bucket);
  }
  std::vector<OpenBucket*> left;
  for (auto& [kind, bucket] : open) {
    if (!bucket.indices.empty()) left.push_back(&bucket);
  }
  std::vector<std::size_t> place(tensors.size());
  for (std::size_t i = 0; i < options.order.size(); ++i) place[options.order[i]] = i;
  std::sort(left.begin(), left.end(), [&](const OpenBucket* a, const OpenBucket* b) {
    return place[a->indices.back()] < place[b->indices.back()];
  });
  for (OpenBucket* bucket : left) close(*bucket);
  if (options.order.empty()) sort_by_smallest_index(assignment);
  return assignment;
}

std::shared_ptr<Buckets> build_buckets(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                                       const collective::Group& group,
                                       const std::vector<std::size_t>& order) {
  std::vector<at::Tensor> tensors;
  AssignmentOptions assignment{.order = order};
  for (const Parameter& parameter : replicas[0]) {
    tensors.push_back(parameter.tensor);
    assignment.sparse.push_back(parameter.sparse_gradient);
  }
  return std::make_shared<Buckets>(
      replicas, compute_bucket_assignment_by_size(tensors, limits_of(options), assignment), group);
}

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
    throw_invalid(
        sparse ? "it got a dense gradient, but was declared to have a sparse one"
               : "it got a sparse gradient; name it in sparse_parameters, or make its embedding dense");
  }
  if (!sparse && (gradient.scalar_type() != view.scalar_type() || gradient.sizes() != view.sizes())) {
    throw_invalid(
        "its gradient does not have the dtype or shape that the parameter had when it was wrapped; convert "
        "the module before it is wrapped");
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
