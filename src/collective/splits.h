#pragma once
#include <functional>
#include <vector>

#include <torchspan/core/bytes.h>

namespace torchspan::collective {

/// Collective: sends `color` and `key` to all ranks; returns the ranks with this color, ordered by key, then
/// by rank.
std::vector<int> ranks_of_split(const std::function<std::vector<Bytes>(BytesView mine)>& gather, int color,
                                int key);

}  // namespace torchspan::collective
