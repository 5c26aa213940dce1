#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <numbers>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/schedule.h>

namespace torchspan::optim {
namespace {

void check_steps(const char* schedule, const char* option, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("{}: {} = {}, but it must be a number from {} up", schedule, option, value, least));
}

/// Half a wave from `from` to `to`.
double wave(double from, double to, double share) {
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * share));
}

}  // namespace

Schedule step_decay(StepDecay options) {
  check_steps("step_decay", "every", options.every, 1);
  check_not_negative("step_decay", "factor", options.factor);
  return [options](std::int64_t step) {
    const std::int64_t changes = step / options.every;
    return std::pow(options.factor, static_cast<double>(changes));
  };
}

Schedule cosine(Cosine options) {
  check_steps("cosine", "steps", options.steps, 1);
  check_not_negative("cosine", "least", options.least);
  return [options](std::int64_t step) {
    const double share =
        static_cast<double>(std::min(step, options.steps)) / static_cast<double>(options.steps);
    return wave(1, options.least, share);
  };
}

Schedule warm_up(WarmUp options) {
  check_steps("warm_up", "steps", options.steps, 1);
  check_not_negative("warm_up", "from", options.from);
  return [options](std::int64_t step) {
    if (step < options.steps) {
      return options.from +
             (1 - options.from) * static_cast<double>(step) / static_cast<double>(options.steps);
    }
    return options.then ? options.then(step - options.steps) : 1.0;
  };
}

Schedule one_cycle(OneCycle options) {
  check_steps("one_cycle", "steps", options.steps, 2);
  check_not_negative("one_cycle", "first", options.first);
  check_not_negative("one_cycle", "last", options.last);
  const double end = static_cast<double>(options.steps - 1);
  const double top = options.rising * static_cast<double>(options.steps) - 1;
  if (!(top >= 0 && top < end)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("one_cycle: rising = {} of {} steps, but it must leave at least one step to rise "
                            "and one to fall",
                            options.rising, options.steps));
  }
  return [options, end, top](std::int64_t step) {
    const double at = std::min(static_cast<double>(step), end);
    if (at <= top) return top == 0 ? 1.0 : wave(options.first, 1, at / top);
    return wave(1, options.last, (at - top) / (end - top));
  };
}

LrSchedule::LrSchedule(RateHolder& optimizer, const Schedule& schedule)
    : LrSchedule(optimizer, std::vector<Schedule>(optimizer.lrs().size(), schedule)) {}

LrSchedule::LrSchedule(RateHolder& optimizer, std::vector<Schedule> schedules)
    : optimizer_(optimizer), schedules_(std::move(schedules)), base_(optimizer.lrs()) {
  if (schedules_.size() != base_.size()) {
    throw Error(ErrorKind::kInvalid, fmt::format("there are {} groups and {} schedules: give one for each",
                                                 base_.size(), schedules_.size()));
  }
  for (std::size_t g = 0; g < base_.size(); ++g) {
    if (!schedules_[g]) throw Error(ErrorKind::kInvalid, "a schedule is empty: give a function of the step");
    if (!std::isnan(base_[g])) continue;
    throw Error(ErrorKind::kInvalid,
                fmt::format("the optimizer of group {} has no learning rate to schedule", g));
  }
  set_steps(0);
}

void LrSchedule::set_steps(std::int64_t steps) {
  check_steps("LrSchedule", "steps", steps, 0);
  std::vector<double> rates;
  for (std::size_t g = 0; g < base_.size(); ++g) rates.push_back(base_[g] * schedules_[g](steps));
  optimizer_.set_lrs(rates);
  steps_ = steps;
}

StateDict LrSchedule::state_dict() const {
  StateDict state;
  state.insert("steps", at::scalar_tensor(steps_, at::kLong));
  state.insert("base", at::tensor(base_, at::kDouble));
  return state;
}

void LrSchedule::load_state_dict(const StateDict& state) {
  const at::Tensor* steps = state.find("steps");
  const at::Tensor* base = state.find("base");
  if (steps == nullptr || base == nullptr || steps->numel() != 1 ||
      base->numel() != static_cast<std::int64_t>(base_.size()) || base->scalar_type() != at::kDouble) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the state is not one of an LrSchedule over {} groups", base_.size()));
  }
  const at::Tensor rates = base->contiguous();
  base_.assign(rates.data_ptr<double>(), rates.data_ptr<double>() + rates.numel());
  set_steps(steps->item<std::int64_t>());
}

}  // namespace torchspan::optim
