#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "state/api/place.h"

namespace torchspan::checkpoint {

using state::Box;
using state::describe;
using state::fits;
using state::Sizes;

/// The box of a whole tensor.
Box whole_box(const Sizes& shape);
/// Number of elements; nullopt if it exceeds 2^63 - 1 or a size is negative.
std::optional<std::int64_t> element_count(const Sizes& shape);
/// The common part of two boxes of one tensor; nullopt if they share no element. A tensor without dimensions
/// has one element.
std::optional<Box> intersection(const Box& a, const Box& b);
/// Why these boxes do not cover the box `wanted` exactly once; empty if they do.
std::string coverage_fault(const Box& wanted, const std::vector<Box>& boxes);

}  // namespace torchspan::checkpoint
