#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/optimizer.h>

#include "device/api/half.h"
#include "device/api/numbers.h"
#include "optim/parameters.h"

namespace torchspan::optim {
namespace {

/// The norms of the gradients that are defined and have elements.
std::vector<double> norms_of(const std::vector<at::Tensor>& gradients, double type) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const at::Tensor values = gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
    if (values.numel() == 0) continue;
    norms.push_back(at::linalg_vector_norm(device::widened(values), type));
  }
  return device::read_numbers(norms);
}

}  // namespace

double gradient_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  if (!(norm_type > 0)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("norm_type = {}, but it must be a number above 0, or infinity", norm_type));
  }
  at::NoGradGuard no_grad;
  double total = 0;
  for (const double norm : norms_of(gradients, norm_type)) {
    if (std::isnan(norm)) return norm;
    total = std::isinf(norm_type) ? std::max(total, norm) : total + std::pow(norm, norm_type);
  }
  return std::isinf(norm_type) ? total : std::pow(total, 1 / norm_type);
}

double clip_factor(double norm, double max_norm) {
  if (!(max_norm > 0)) {
    throw Error(ErrorKind::kInvalid, fmt::format("max_norm = {}, but it must be a number above 0", max_norm));
  }
  const double factor = max_norm / (norm + 1e-6);
  return factor < 1 || std::isnan(factor) ? factor : 1;
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  std::vector<at::Tensor> gradients = gradients_of(parameters);
  const double norm = gradient_norm(gradients, norm_type);
  const double factor = clip_factor(norm, max_norm);
  if (factor == 1) return norm;
  at::NoGradGuard no_grad;
  for (at::Tensor& gradient : gradients) gradient.mul_(factor);
  return norm;
}

}  // namespace torchspan::optim
