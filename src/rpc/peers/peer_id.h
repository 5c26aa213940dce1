#pragma once
#include <compare>
#include <cstdint>

namespace torchspan::rpc {

/// One process of the world: a rank, and how many processes held that rank before it.
struct PeerId {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  friend auto operator<=>(const PeerId&, const PeerId&) = default;
};

}  // namespace torchspan::rpc
