#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "state/api/place.h"

namespace torchspan::state {

/// A gradient and the place of its parameter. An undefined gradient counts as zeros.
struct PlacedGradient {
  at::Tensor gradient;
  PlacePtr place;
};

/// The gradients of parameters, each parameter once.
std::vector<PlacedGradient> gradients_at_places(const std::vector<at::Tensor>& parameters);

/// The norm of the gradients of this process as one vector, of type `norm_type`. Undefined ones are skipped.
double norm_of(const std::vector<at::Tensor>& gradients, double norm_type);

/// The norm of the gradients of the whole model: each of its elements counts once, on whichever rank it is. Collective over
/// the ranks of the places, with the same result on all of them.
double norm_over_places(const std::vector<PlacedGradient>& gradients, double norm_type);

/// Factor that scales gradients with this norm to at most `max_norm`: 1, or max_norm / (norm + 1e-6) as in LibTorch.
double clip_factor(double norm, double max_norm);
/// Scales the gradients to a norm over places of at most `max_norm`; returns the norm before. Collective like
/// norm_over_places(). Both numbers must be above 0.
double clip(const std::vector<PlacedGradient>& gradients, double max_norm, double norm_type);

/// Whether `finding` is true on one of the ranks among which one of the places is divided. Collective over them.
bool on_any_rank(const std::vector<PlacedGradient>& gradients, bool finding);

}  // namespace torchspan::state
