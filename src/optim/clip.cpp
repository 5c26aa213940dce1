#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/optimizer.h>

#include "optim/parameters.h"
#include "state/api/gradient_norm.h"

namespace torchspan::optim {
namespace {

void check_type(double norm_type) {
  if (norm_type > 0) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("norm_type = {}, but it must be a number above 0, or infinity", norm_type));
}

}  // namespace

double gradient_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  check_type(norm_type);
  return state::norm_of(gradients, norm_type);
}

double clip_factor(double norm, double max_norm) {
  if (!(max_norm > 0)) {
    throw Error(ErrorKind::kInvalid, fmt::format("max_norm = {}, but it must be a number above 0", max_norm));
  }
  return state::clip_factor(norm, max_norm);
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  check_type(norm_type);
  clip_factor(0, max_norm);  // checks the option on all ranks, before any of them waits
  return state::clip(state::gradients_at_places(parameters), max_norm, norm_type);
}

}  // namespace torchspan::optim
