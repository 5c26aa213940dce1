#pragma once
#include <cstddef>
#include <span>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// Reduces `count` elements: reads `sources`, one array per rank in rank order, and writes the result to all
/// `targets`, which may also be sources. The bits of a result depend only on the elements at its index.
/// `ranks` is the divisor of an average.
struct Reducing {
  std::span<const std::byte* const> sources;
  std::span<std::byte* const> targets;
  std::size_t count = 0;
  std::size_t ranks = 1;
};
using Kernel = void (*)(const Reducing& work);

/// Throws kUnsupported for a dtype without that reduction; the error lists the dtypes that have it.
Kernel find_kernel(at::ScalarType dtype, ReduceOp reduction);

}  // namespace torchspan::collective
