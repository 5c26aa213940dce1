#include "sharded/units/gradient_shards.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

void GradientShards::collect(const at::Tensor& flat, const std::vector<at::Tensor>& gradients) {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const FlatParameters::Entry& entry = parameters_.entries()[i];
    if (!gradients[i].defined()) continue;
    if (gradients[i].layout() != at::kStrided) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format(
              "parameter '{}' got a sparse gradient, which cannot be divided; make its embedding dense",
              entry.name));
    }
    used_[i] = 1;
    flat.narrow(0, entry.offset, entry.full.numel()).view(entry.full.sizes()).add_(gradients[i]);
  }
}

void GradientShards::add(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  if (!sum_.defined()) sum_ = at::zeros({parameters_.size()}, parameters_.part().options());
  collect(sum_, gradients);
}

void GradientShards::reduce(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  wait();
  const collective::Group& group = parameters_.group();
  sent_ = parameters_.pool().take(parameters_.size(), parameters_.part().options());
  sum_.defined() ? static_cast<void>(sent_.copy_(sum_)) : static_cast<void>(sent_.zero_());
  sum_ = at::Tensor();
  collect(sent_, gradients);
  const at::ScalarType dtype = sent_.scalar_type();
  const bool divides_first = dtype == at::kHalf || dtype == at::kComplexHalf;
  if (divides_first) sent_.mul_(1.0 / group.size());
  // As rows, because the rows' length differs between units: ranks that reduce different ones get an error.
  running_ = group.reduce_scatter(sent_.view({group.size(), parameters_.chunk()}),
                                  divides_first ? collective::kSum : collective::kAvg);
}

void GradientShards::wait() {
  if (!running_.valid()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor part = std::exchange(running_, {}).wait().view({-1});
  if (average_.defined()) {
    average_.add_(part);
  } else {
    average_ = part.data_ptr() == sent_.data_ptr() ? part.clone() : part;
  }
  parameters_.pool().give(std::exchange(sent_, {}));
}

void GradientShards::commit(const std::int32_t* used) {
  const at::NoGradGuard no_grad;
  wait();
  std::fill(used_.begin(), used_.end(), 0);
  const at::Tensor average = std::exchange(average_, {});
  if (!average.defined()) return;
  for (std::size_t i = 0; i < parameters_.entries().size(); ++i) {
    if (used[i] == 0) continue;
    const FlatParameters::Entry& entry = parameters_.entries()[i];
    const std::int64_t start = entry.part.storage_offset() - parameters_.part().storage_offset();
    const at::Tensor mine = average.narrow(0, start, entry.part.numel());
    at::Tensor& field = entry.tensor.mutable_grad();
    if (field.defined()) {
      field.add_(mine);
    } else {
      field = mine.variable_data();
    }
  }
}

void GradientShards::drop() {
  std::fill(used_.begin(), used_.end(), 0);
  sum_ = at::Tensor();
  running_ = {};
  average_ = at::Tensor();
  sent_ = at::Tensor();  // not to the pool: the operation may still write to it
}

}  // namespace torchspan::sharded
