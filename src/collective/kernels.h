#pragma once
#include <cstddef>
#include <span>

#include <torchspan/collective.h>

namespace torchspan::collective {

/// Arguments of a kernel, which reduces `count` elements: it reads `sources`, one array per rank, in this
/// order, and writes the result to all `targets`, which may be sources too. The bits of a result depend only
/// on the elements at its index. An average is divided by `ranks`.
struct Reducing {
  std::span<const std::byte* const> sources;
  std::span<std::byte* const> targets;
  std::size_t count = 0;
  std::size_t ranks = 1;
};
using Kernel = void (*)(const Reducing& work);

/// Throws kUnsupported for a dtype that cannot be reduced in this way, and says which can.
Kernel find_kernel(at::ScalarType dtype, ReduceOp reduction);

}  // namespace torchspan::collective
