#pragma once
#include <functional>
#include <vector>

#include <torchspan/core/bytes.h>

namespace torchspan::collective {

/// Collective: tells everybody `color` and `key`; returns the ranks that gave this color, by key, then by
/// rank: the ranks of a split.
std::vector<int> ranks_of_split(const std::function<std::vector<Bytes>(BytesView mine)>& gather, int color,
                                int key);

}  // namespace torchspan::collective
