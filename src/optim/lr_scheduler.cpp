#include <algorithm>
#include <cmath>
#include <numbers>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/optimizer.h>

#include "core/api/throw_invalid.h"

namespace torchspan::optim {
namespace {

void check_steps(const char* schedule, const char* option, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw_invalid("{}: {} = {}, but it must be a number >= {}", schedule, option, value, least);
}

/// Half a cosine wave from `from` to `to`.
double wave(double from, double to, double share) {
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * share));
}

}  // namespace

StepLR::operator LRLambda() const {
  check_steps("StepLR", "step_size", step_size, 1);
  check_not_negative("StepLR", "gamma", gamma);
  return [options = *this](std::int64_t step) {
    const std::int64_t changes = step / options.step_size;
    return std::pow(options.gamma, static_cast<double>(changes));
  };
}

CosineAnnealingLR::operator LRLambda() const {
  check_steps("CosineAnnealingLR", "t_max", t_max, 1);
  check_not_negative("CosineAnnealingLR", "eta_min_factor", eta_min_factor);
  return [options = *this](std::int64_t step) {
    const double share =
        static_cast<double>(std::min(step, options.t_max)) / static_cast<double>(options.t_max);
    return wave(1, options.eta_min_factor, share);
  };
}

WarmupLR::operator LRLambda() const {
  check_steps("WarmupLR", "total_iters", total_iters, 1);
  check_not_negative("WarmupLR", "start_factor", start_factor);
  return [options = *this](std::int64_t step) {
    if (step < options.total_iters) {
      return options.start_factor + (1 - options.start_factor) * static_cast<double>(step) /
                                        static_cast<double>(options.total_iters);
    }
    return options.then ? options.then(step - options.total_iters) : 1.0;
  };
}

OneCycleLR::operator LRLambda() const {
  check_steps("OneCycleLR", "total_steps", total_steps, 2);
  check_positive("OneCycleLR", "div_factor", div_factor);
  check_positive("OneCycleLR", "final_div_factor", final_div_factor);
  const double end = static_cast<double>(total_steps - 1);
  const double top = pct_start * static_cast<double>(total_steps) - 1;
  if (!(top >= 0 && top < end)) {
    throw_invalid(
        "OneCycleLR: pct_start = {} of {} steps, but it must leave at least one step for the rise and one "
        "for the fall",
        pct_start, total_steps);
  }
  const double first = 1 / div_factor, last = 1 / (div_factor * final_div_factor);
  return [end, top, first, last](std::int64_t step) {
    const double at = std::min(static_cast<double>(step), end);
    if (at <= top) return top == 0 ? 1.0 : wave(first, 1, at / top);
    return wave(1, last, (at - top) / (end - top));
  };
}

LRScheduler::LRScheduler(LRTarget& optimizer, const LRLambda& schedule)
    : LRScheduler(optimizer, std::vector<LRLambda>(optimizer.lrs().size(), schedule)) {}

LRScheduler::LRScheduler(LRTarget& optimizer, std::vector<LRLambda> schedules)
    : optimizer_(optimizer), schedules_(std::move(schedules)), base_(optimizer.lrs()) {
  if (schedules_.size() != base_.size()) {
    throw_invalid("there are {} groups and {} schedules; pass one for each group", base_.size(),
                  schedules_.size());
  }
  for (std::size_t g = 0; g < base_.size(); ++g) {
    if (!schedules_[g]) throw_invalid("a schedule is empty; pass a function of the step");
    if (!std::isnan(base_[g])) continue;
    throw_invalid("the optimizer of group {} has no learning rate to schedule", g);
  }
  set_steps(0);
}

void LRScheduler::set_steps(std::int64_t steps) {
  check_steps("LRScheduler", "steps", steps, 0);
  std::vector<double> rates;
  for (std::size_t g = 0; g < base_.size(); ++g) rates.push_back(base_[g] * schedules_[g](steps));
  optimizer_.set_lrs(rates);
  steps_ = steps;
}

StateDict LRScheduler::state_dict() const {
  StateDict state;
  state.insert("steps", at::scalar_tensor(steps_, at::kLong));
  state.insert("base", at::tensor(base_, at::kDouble));
  return state;
}

void LRScheduler::load_state_dict(const StateDict& state) {
  const at::Tensor* steps = state.find("steps");
  const at::Tensor* base = state.find("base");
  if (steps == nullptr || base == nullptr || steps->numel() != 1 ||
      base->numel() != static_cast<std::int64_t>(base_.size()) || base->scalar_type() != at::kDouble) {
    throw_invalid("the state does not belong to an LRScheduler over {} groups", base_.size());
  }
  const at::Tensor rates = base->contiguous();
  base_.assign(rates.data_ptr<double>(), rates.data_ptr<double>() + rates.numel());
  set_steps(steps->item<std::int64_t>());
}

}  // namespace torchspan::optim
