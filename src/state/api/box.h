#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torchspan::state {

using Sizes = std::vector<std::int64_t>;

/// Part of a tensor: from `offset`, `size` elements in each dimension. The whole tensor has offset 0.
struct Box {
  Sizes offset;
  Sizes size;
  friend bool operator==(const Box&, const Box&) = default;
  friend auto operator<=>(const Box&, const Box&) = default;
};

/// Whether the box is within a tensor of this shape.
bool fits(const Box& box, const Sizes& shape);
/// "[2, 3]".
std::string describe(const Sizes& sizes);
/// "[0:2, 3:6]"; "[]" without dimensions.
std::string describe(const Box& box);

}  // namespace torchspan::state
