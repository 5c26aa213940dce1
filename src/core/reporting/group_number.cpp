#include "core/api/group_number.h"

namespace torchspan {

std::int32_t group_number(std::span<const int> ranks) {
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const int rank : ranks) hash = (hash ^ static_cast<std::uint32_t>(rank)) * 16777619u;
  return static_cast<std::int32_t>(hash >> 1);
}

}  // namespace torchspan
