#pragma once
#include <cstddef>
#include <span>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// What reduces `count` elements: reads `sources`, one array for each rank, in their order, and writes the
/// result to all `targets`, which may be sources too. The bits of an element depend on the sources' elements
/// alone. `ranks` divides an average.
struct Reducing {
  std::span<const std::byte* const> sources;
  std::span<std::byte* const> targets;
  std::size_t count = 0;
  std::size_t ranks = 1;
};
using Kernel = void (*)(const Reducing& work);

/// Throws kUnsupported for a dtype that cannot be reduced that way, saying which can.
Kernel find_kernel(at::ScalarType dtype, ReduceOp reduction);

}  // namespace torchspan::collective
