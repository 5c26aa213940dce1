#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "state/api/gradient_norm.h"

namespace torchspan::sharded {

struct ClipTerms {
  /// Throws Error{kInvalid} unless both are > 0.
  ClipTerms(double max, double type);

  double max_norm, norm_type;
};

/// Collective over the ranks of the places: divides gradients by `scale`; returns whether an element is not finite on any rank.
bool unscale_at_places(const std::vector<state::PlacedGradient>& gradients, double scale);

}  // namespace torchspan::sharded
