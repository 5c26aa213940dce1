#pragma once
#include <cmath>

#include "optim/functional/rule.h"

namespace torchspan::optim {

/// The common part of Adam and AdamW: updates both moments, then the parameter. `Options` has beta1, beta2, eps,
/// amsgrad and lr; the slots are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
template <class T, class Options>
void step_by_moments(const Operands<T>& on, const T& direction, const Options& options) {
  T& mean = on.state[0];
  T& square = on.state[1];
  math::mul_(mean, options.beta1);
  math::add_(mean, direction, 1 - options.beta1);
  math::mul_(square, options.beta2);
  math::addcmul_(square, direction, direction, 1 - options.beta2);
  if (options.amsgrad) math::maximum_(on.state[2], square);
  T scale = math::sqrt(on.state[options.amsgrad ? 2 : 1]);
  math::div_(scale, std::sqrt(1 - std::pow(options.beta2, on.steps)));
  math::add_(scale, options.eps);
  math::addcdiv_(on.parameter, mean, scale, -options.lr / (1 - std::pow(options.beta1, on.steps)));
}

/// step_by_moments() as a fused step. Adam adds `weight_decay` to the gradient; AdamW decays the parameter by
/// `parameter_factor`.
template <class Options>
AdamStep fused_step_by_moments(const Options& options, double steps, double weight_decay,
                               double parameter_factor) {
  return {.rate = options.lr / (1 - std::pow(options.beta1, steps)),
          .correction = std::sqrt(1 - std::pow(options.beta2, steps)),
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps,
          .weight_decay = weight_decay,
          .parameter_factor = parameter_factor,
          .amsgrad = options.amsgrad,
          .maximize = options.maximize};
}

template <class Options>
std::vector<std::string> slots_of_moments(const Options& options) {
  std::vector<std::string> slots = {"exp_avg", "exp_avg_sq"};
  if (options.amsgrad) slots.push_back("max_exp_avg_sq");
  return slots;
}

/// Checks the options that Adam and AdamW share. Throws Error{kInvalid} naming the invalid one.
template <class Options>
void check_moments(const Options& options) {
  check_not_negative(Options::kName, "lr", options.lr);
  check_share(Options::kName, "beta1", options.beta1);
  check_share(Options::kName, "beta2", options.beta2);
  check_not_negative(Options::kName, "eps", options.eps);
}

}  // namespace torchspan::optim
