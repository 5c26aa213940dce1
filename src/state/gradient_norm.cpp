#include "state/api/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "device/api/tensors.h"

namespace torchspan::state {
namespace {

/// Positions of ranks in the order of reductions.
using Signature = std::set<std::size_t>;

double joined(double a, double b, bool maximum) {
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  return maximum ? std::max(a, b) : a + b;
}

/// The sum of the powers of the elements; for an infinite type, the largest one.
double share_of(const std::vector<at::Tensor>& gradients, double norm_type) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const at::Tensor values = gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
    // In float at least: a norm of half-precision gradients exceeds their range.
    if (values.numel() > 0) norms.push_back(at::linalg_vector_norm(device::widened(values), norm_type));
  }
  const bool maximum = std::isinf(norm_type);
  double share = 0;
  for (const double norm : device::read_numbers(norms))
    share = joined(share, maximum ? norm : std::pow(norm, norm_type), maximum);
  return share;
}

double norm_of_share(double share, double norm_type) {
  return std::isinf(norm_type) ? share : std::pow(share, 1 / norm_type);
}

/// All ranks of the places, each once: those with the lowest level first, otherwise as they appear.
std::vector<RanksPtr> ranks_of(const std::vector<PlacedGradient>& gradients) {
  std::vector<RanksPtr> all;
  for (const PlacedGradient& one : gradients) {
    if (!one.place) continue;
    for (const RanksPtr& ranks : one.place->among) {
      const bool known = std::ranges::any_of(
          all, [&](const RanksPtr& other) { return other->identity() == ranks->identity(); });
      if (!known) all.push_back(ranks);
    }
  }
  std::ranges::stable_sort(all, {}, [](const RanksPtr& ranks) { return ranks->level(); });
  return all;
}

}  // namespace

std::vector<PlacedGradient> gradients_at_places(const std::vector<at::Tensor>& parameters) {
  std::vector<PlacedGradient> gradients;
  std::set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      gradients.push_back({parameter.grad(), place_of(parameter)});
  }
  return gradients;
}

double norm_of(const std::vector<at::Tensor>& gradients, double norm_type) {
  return norm_of_share(share_of(gradients, norm_type), norm_type);
}

/// Parameters that are divided among the same ranks have one number. A reduction over ranks replaces the numbers of all that
/// are divided among them; those that are then divided among the same remaining ranks become one.
double norm_over_places(const std::vector<PlacedGradient>& gradients, double norm_type) {
  const bool maximum = std::isinf(norm_type);
  const std::vector<RanksPtr> ranks = ranks_of(gradients);
  std::map<Signature, std::vector<at::Tensor>> local;
  for (const PlacedGradient& one : gradients) {
    Signature signature;
    for (std::size_t i = 0; one.place && i < ranks.size(); ++i) {
      const bool among = std::ranges::any_of(
          one.place->among, [&](const RanksPtr& other) { return other->identity() == ranks[i]->identity(); });
      if (among) signature.insert(i);
    }
    auto& tensors = local[signature];
    if (!one.place || !one.place->repeated) tensors.push_back(one.gradient);
  }
  std::map<Signature, double> shares;
  for (const auto& [signature, tensors] : local) shares[signature] = share_of(tensors, norm_type);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    std::vector<Signature> left;
    std::vector<double> numbers;
    for (auto entry = shares.begin(); entry != shares.end();) {
      if (!entry->first.contains(i)) {
        ++entry;
        continue;
      }
      left.push_back(entry->first);
      left.back().erase(i);
      numbers.push_back(entry->second);
      entry = shares.erase(entry);
    }
    ranks[i]->reduce(numbers, maximum);
    for (std::size_t n = 0; n < numbers.size(); ++n) {
      const auto [share, is_new] = shares.emplace(left[n], numbers[n]);
      if (!is_new) share->second = joined(share->second, numbers[n], maximum);
    }
  }
  return norm_of_share(shares.empty() ? 0 : shares.begin()->second, norm_type);
}

double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor < 1 || std::isnan(factor) ? factor : 1;
}

double clip(const std::vector<PlacedGradient>& gradients, double max_norm, double norm_type) {
  const double norm = norm_over_places(gradients, norm_type);
  const double factor = clip_factor(norm, max_norm);
  if (factor == 1) return norm;
  const at::NoGradGuard no_grad;
  for (const PlacedGradient& one : gradients) {
    if (one.gradient.defined()) one.gradient.mul_(factor);
  }
  return norm;
}

bool on_any_rank(const std::vector<PlacedGradient>& gradients, bool finding) {
  std::vector<double> found{finding ? 1.0 : 0.0};
  for (const RanksPtr& ranks : ranks_of(gradients)) ranks->reduce(found, /*maximum=*/true);
  return found.front() > 0;
}

}  // namespace torchspan::state
