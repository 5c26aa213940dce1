#pragma once
#include <cstdint>
#include <span>

namespace torchspan {

/// The number by which spans and states name a group of ranks: equal on all of its ranks, not negative, and with high
/// probability different for different lists of ranks.
std::int32_t group_number(std::span<const int> ranks);

}  // namespace torchspan
