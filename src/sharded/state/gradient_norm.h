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

/// Collective over the ranks of the places: scales gradients to a total norm of at most `max_norm`. Returns the norm before
/// scaling.
double clip_at_places(const std::vector<state::PlacedGradient>& gradients, const ClipTerms& terms);

/// Collective over them: divides gradients by `scale`; returns whether an element is not finite on any rank.
bool unscale_at_places(const std::vector<state::PlacedGradient>& gradients, double scale);

}  // namespace torchspan::sharded
