#include <algorithm>
#include <atomic>
#include <fmt/format.h>
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/local_sgd.h>

#include "data_parallel/averaging/packed_tensors.h"
#include "data_parallel/averaging/parameter_agreement.h"

namespace torchspan::data_parallel {
namespace {

CommHook make_local_hook(std::int64_t start_iteration, std::optional<collective::Group> near) {
  if (start_iteration < 0) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("start_iteration is {}; it must not be negative", start_iteration));
  }
  const auto begun = std::make_shared<std::atomic<std::int64_t>>(0);
  return [start_iteration, near = std::move(near), begun](const GradientBucket& bucket,
                                                          const collective::Group& group) {
    if (bucket.index == 0) ++*begun;
    if (*begun <= start_iteration) return all_reduce_hook()(bucket, group);
    if (!near) return make_ready_future<at::Tensor>(bucket.buffer);
    GradientBucket local = bucket;
    local.divisor = near->size();
    return all_reduce_hook()(local, *near);
  };
}

void check_levels(const std::vector<AveragingLevel>& levels) {
  if (levels.empty()) throw Error(ErrorKind::kInvalid, "ModelAverager needs at least one level");
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const std::int64_t period = levels[i].period, before = i == 0 ? 1 : levels[i - 1].period;
    if (period < 1 || period % before != 0 || (i > 0 && period == before)) {
      throw Error(ErrorKind::kInvalid,
                  fmt::format("the period of averaging level {} is {}; it must be a multiple of {}{}", i,
                              period, before, i == 0 ? "" : ", the period before it, and larger"));
    }
  }
}

}  // namespace

CommHook post_local_sgd_hook(std::int64_t start_iteration) {
  return make_local_hook(start_iteration, std::nullopt);
}

CommHook post_local_sgd_hook(std::int64_t start_iteration, collective::Group near) {
  return make_local_hook(start_iteration, std::move(near));
}

ModelAverager::ModelAverager(std::vector<at::Tensor> parameters, std::vector<AveragingLevel> levels,
                             std::int64_t warmup_steps)
    : parameters_(std::move(parameters)), levels_(std::move(levels)), warmup_steps_(warmup_steps) {
  check_levels(levels_);
  for (const AveragingLevel& level : levels_) {
    agree(level.group,
          agreement_on(
              level.group, parameters_,
              {{"period", std::to_string(level.period)}, {"warmup_steps", std::to_string(warmup_steps)}}),
          "parameters");
  }
}

ModelAverager::ModelAverager(std::vector<at::Tensor> parameters, collective::Group group, std::int64_t period,
                             std::int64_t warmup_steps)
    : ModelAverager(std::move(parameters), {{std::move(group), period}}, warmup_steps) {}

bool ModelAverager::step() {
  const at::NoGradGuard no_grad;
  ++steps_;
  const std::int64_t steps = steps_ - warmup_steps_;
  const auto due = std::find_if(levels_.rbegin(), levels_.rend(), [&](const AveragingLevel& level) {
    return steps > 0 && steps % level.period == 0;
  });
  if (due == levels_.rend()) return false;
  std::vector<at::Tensor> elements;
  for (const at::Tensor& parameter : parameters_) {
    if (is_averaged(parameter)) elements.push_back(averaged_elements(parameter));
  }
  const std::vector<at::Tensor> averages = PackedAverages(due->group, elements).wait();
  for (std::size_t i = 0; i < averages.size(); ++i) elements[i].detach().copy_(averages[i]);
  return true;
}

}  // namespace torchspan::data_parallel
