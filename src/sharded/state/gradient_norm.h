#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>

namespace torchspan::sharded {

struct ClipTerms {
  /// Throws Error{kInvalid} unless both are > 0.
  ClipTerms(double max, double type);

  double max_norm, norm_type;
};

/// Collective: scales gradients, of which each rank has other elements, to a total norm of at most `max_norm`.
/// Returns the norm before scaling.
double clip_over_ranks(const collective::Group& group, const std::vector<at::Tensor>& gradients,
                       const ClipTerms& terms);

/// Collective: divides such gradients by `scale`; returns whether an element is not finite on any rank.
bool unscale_over_ranks(const collective::Group& group, const std::vector<at::Tensor>& gradients,
                        double scale);

}  // namespace torchspan::sharded
