#pragma once
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::sharded {

/// The indices of two tensors that have elements in the same memory; nullopt if there are none. Ignores tensors with
/// gaps between their elements.
std::optional<std::pair<std::size_t, std::size_t>> overlapping(const std::vector<at::Tensor>& tensors);

}  // namespace torchspan::sharded
