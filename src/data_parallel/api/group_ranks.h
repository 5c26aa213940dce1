#pragma once
#include <torchspan/collective/group.h>

#include "state/api/place.h"

namespace torchspan::data_parallel {

/// The ranks of a group, for places of tensors.
state::RanksPtr ranks_of(const collective::Group& group, int level);

}  // namespace torchspan::data_parallel
