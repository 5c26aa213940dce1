#include "sharded/state/gradient_norm.h"

#include <cmath>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/optim/optimizer.h>

namespace torchspan::sharded {

ClipTerms::ClipTerms(double max, double type) : max_norm(max), norm_type(type) {
  optim::clip_factor(0, max_norm);
  optim::gradient_norm({}, norm_type);
}

double clip_over_ranks(const collective::Group& group, const std::vector<at::Tensor>& gradients,
                       const ClipTerms& terms) {
  const at::NoGradGuard no_grad;
  const double own = optim::gradient_norm(gradients, terms.norm_type);
  const bool maximum = std::isinf(terms.norm_type);
  // The second element survives a maximum over ranks, in which a NaN may be lost.
  const at::Tensor total = at::zeros({2}, at::kDouble);
  auto* values = total.data_ptr<double>();
  values[0] = maximum ? (std::isnan(own) ? 0 : own) : std::pow(own, terms.norm_type);
  values[1] = std::isnan(own) ? 1 : 0;
  group.all_reduce(total, maximum ? collective::kMax : collective::kSum).wait();
  double norm = maximum ? values[0] : std::pow(values[0], 1 / terms.norm_type);
  if (values[1] > 0) norm = std::nan("");
  const double factor = optim::clip_factor(norm, terms.max_norm);
  if (factor == 1) return norm;
  for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
  return norm;
}

bool unscale_over_ranks(const collective::Group& group, const std::vector<at::Tensor>& gradients,
                        double scale) {
  const at::NoGradGuard no_grad;
  at::Tensor wrong;  // on the device of the gradients
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor here = at::isfinite(gradient).logical_not_().any();
    wrong = wrong.defined() ? wrong.logical_or(here) : here;
    gradient.div_(scale);
  }
  const at::Tensor any = at::zeros({1}, at::kInt);
  any.fill_(wrong.defined() && wrong.item<bool>() ? 1 : 0);
  group.all_reduce(any, collective::kMax).wait();
  return any.item<int>() != 0;
}

}  // namespace torchspan::sharded
