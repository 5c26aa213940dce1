#include "sharded/zero/bucket_parameters.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

namespace torchspan::sharded {

BucketParameters::BucketParameters(collective::Group group, std::vector<BucketShards> layout,
                                   const std::vector<data_parallel::Parameter>& parameters)
    : group_(std::move(group)), layout_(std::move(layout)), gathers_(layout_.size()) {
  const at::NoGradGuard no_grad;
  for (const BucketShards& bucket : layout_) {
    const at::Tensor& like = parameters[bucket.places[0].parameter].tensor;
    flats_.push_back(shared_or_private(group_, bucket.count, like.options().requires_grad(false)));
    for (const BucketShards::Place& place : bucket.places) {
      const data_parallel::Parameter& parameter = parameters[place.parameter];
      const at::Tensor view =
          flats_.back().narrow(0, place.offset, place.count).view(parameter.tensor.sizes());
      view.copy_(parameter.tensor);
      parameter.tensor.set_data(view);
      held_.push_back({parameter, view, flats_.size() - 1});
    }
  }
}

bool BucketParameters::Held::fits() const {
  const at::Tensor& tensor = parameter.tensor;
  return tensor.sizes() == view.sizes() && tensor.scalar_type() == view.scalar_type() &&
         tensor.device() == view.device();
}

void BucketParameters::adopt() {
  for (const Held& held : held_) {
    const at::Tensor& tensor = held.parameter.tensor;
    if (tensor.numel() == 0 || !held.fits()) continue;
    if (tensor.data_ptr() == held.view.data_ptr() && tensor.is_contiguous()) continue;
    wait(held.bucket);  // the step before it
    const at::NoGradGuard no_grad;
    held.view.copy_(tensor);
    tensor.set_data(held.view);
  }
}

void BucketParameters::check() const {
  for (const Held& held : held_) {
    if (held.fits()) continue;
    const at::Tensor& tensor = held.parameter.tensor;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' is {} {} on {} now, but was {} {} on {} when the "
                    "ZeroRedundancyOptimizer was made; convert the module before",
                    held.parameter.name, c10::toString(tensor.scalar_type()), c10::str(tensor.sizes()),
                    tensor.device().str(), c10::toString(held.view.scalar_type()),
                    c10::str(held.view.sizes()), held.view.device().str()));
  }
}

void BucketParameters::begin_gather(std::size_t bucket) {
  wait(bucket);
  const BucketShards& shards = layout_[bucket];
  const at::Tensor& flat = flats_[bucket];
  const std::int64_t even = shards.ranks * shards.chunk;
  Gather gather{
      PartGather(group_, flat.narrow(0, 0, even), flat.narrow(0, shards.begin(group_.rank()), shards.chunk)),
      {}};
  if (shards.remainder() > 0)
    gather.remainder = group_.broadcast(flat.narrow(0, even, shards.remainder()), group_.size() - 1);
  gathers_[bucket] = std::move(gather);
}

void BucketParameters::wait(std::size_t bucket) {
  if (failure_) std::rethrow_exception(failure_);
  std::optional<Gather> gather = std::exchange(gathers_[bucket], std::nullopt);
  if (!gather) return;
  try {
    gather->parts.wait();
    if (gather->remainder.valid()) gather->remainder.wait();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void BucketParameters::wait_all() {
  for (std::size_t bucket = gathers_.size(); bucket-- > 0;) wait(bucket);
}

std::size_t BucketParameters::arriving() const {
  return static_cast<std::size_t>(
      std::count_if(gathers_.begin(), gathers_.end(), [](const auto& gather) { return gather.has_value(); }));
}

}  // namespace torchspan::sharded
