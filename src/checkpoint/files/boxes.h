#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchspan::checkpoint {

using Sizes = std::vector<std::int64_t>;

/// Part of a tensor: from `offset`, `size` elements in each dimension. The whole tensor has offset 0.
struct Box {
  Sizes offset;
  Sizes size;
  friend bool operator==(const Box&, const Box&) = default;
  friend auto operator<=>(const Box&, const Box&) = default;
};

/// The box of a whole tensor.
Box whole_box(const Sizes& shape);
/// Number of elements; nullopt if it exceeds 2^63 - 1 or a size is negative.
std::optional<std::int64_t> element_count(const Sizes& shape);
/// Whether the box is within a tensor of this shape.
bool fits(const Box& box, const Sizes& shape);
/// The common part of two boxes of one tensor; nullopt if they share no element. A tensor without dimensions
/// has one element.
std::optional<Box> intersection(const Box& a, const Box& b);
/// Why these boxes do not cover the box `wanted` exactly once; empty if they do.
std::string coverage_fault(const Box& wanted, const std::vector<Box>& boxes);

/// "[2, 3]".
std::string describe(const Sizes& sizes);
/// "[0:2, 3:6]"; "[]" without dimensions.
std::string describe(const Box& box);

}  // namespace torchspan::checkpoint
