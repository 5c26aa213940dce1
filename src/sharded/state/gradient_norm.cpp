#include "sharded/state/gradient_norm.h"

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/optim/optimizer.h>

namespace torchspan::sharded {

ClipTerms::ClipTerms(double max, double type) : max_norm(max), norm_type(type) {
  optim::clip_factor(0, max_norm);
  optim::gradient_norm({}, norm_type);
}

bool unscale_at_places(const std::vector<state::PlacedGradient>& gradients, double scale) {
  const at::NoGradGuard no_grad;
  at::Tensor wrong;  // on the device of the gradients
  for (const state::PlacedGradient& one : gradients) {
    if (!one.gradient.defined()) continue;
    const at::Tensor here = at::isfinite(one.gradient).logical_not_().any();
    wrong = wrong.defined() ? wrong.logical_or(here) : here;
    one.gradient.div_(scale);
  }
  return state::on_any_rank(gradients, wrong.defined() && wrong.item<bool>());
}

}  // namespace torchspan::sharded
