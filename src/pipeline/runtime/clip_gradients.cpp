#include "pipeline/runtime/clip_gradients.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device/api/half.h"
#include "device/api/numbers.h"

namespace torchspan::pipeline {
namespace {

/// Whether another copy of a tied parameter counts instead of this one.
bool counts_elsewhere(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (std::size_t copy = 0; copy < tie.copies.size(); ++copy) {
      if (tie.copies[copy].is_same(parameter)) return copy > 0 || tie.workers.front() != local.me;
    }
  }
  return false;
}

/// The sum of the powers of this worker's gradients; for an infinite type, their largest absolute value.
double own_share(const LocalPipeline& local, const std::vector<at::Tensor>& parameters, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0 || counts_elsewhere(local, parameter)) continue;
    if (gradient.is_sparse()) gradient = gradient.coalesce()._values();
    // In float at least: a norm of half-precision gradients exceeds their range.
    gradient = device::widened(gradient.detach());
    norms.push_back(gradient.norm(norm_type));
  }
  double share = 0;
  for (const double norm : device::read_numbers(norms)) {
    if (std::isnan(norm)) return norm;
    share = std::isinf(norm_type) ? std::max(share, norm) : share + std::pow(norm, norm_type);
  }
  return share;
}

}  // namespace

double clip_gradients(const LocalPipeline& local, const std::vector<at::Tensor>& parameters, double max_norm,
                      double norm_type) {
  if (!(max_norm > 0))
    throw Error(ErrorKind::kInvalid,
                fmt::format("clip_grad_norm: max_norm is {}; it must be more than 0", max_norm));
  if (!(norm_type > 0))
    throw Error(ErrorKind::kInvalid,
                fmt::format("clip_grad_norm: norm_type is {}; it must be more than 0", norm_type));
  const torch::autograd::AutoGradMode no_grad(false);
  const double mine = own_share(local, parameters, norm_type);
  Bytes bytes(sizeof mine);
  std::memcpy(bytes.data(), &mine, sizeof mine);
  double total = 0;
  for (const Bytes& other :
       local.worker.all_gather_bytes(bytes, local.plan.workers, local.options.stall_timeout)) {
    double share = 0;
    std::memcpy(&share, other.data(), std::min(other.size(), sizeof share));
    const bool largest = std::isinf(norm_type) && !std::isnan(share) && !std::isnan(total);
    total = largest ? std::max(total, share) : total + share;
  }
  const double norm = std::isinf(norm_type) ? total : std::pow(total, 1 / norm_type);
  const double factor = max_norm / (norm + 1e-6);
  if (factor < 1 || std::isnan(factor)) {
    for (const at::Tensor& parameter : parameters) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    }
  }
  return norm;
}

}  // namespace torchspan::pipeline
