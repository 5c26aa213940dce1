#pragma once
#include <functional>

#include <torchspan/collective.h>

#include "state/api/place.h"

namespace torchspan::data_parallel {

/// The ranks of a group, for places of tensors. `check`, if set, is called before each reduction, and may throw.
state::RanksPtr ranks_of(const collective::Group& group, int level, std::function<void()> check = nullptr);

}  // namespace torchspan::data_parallel
