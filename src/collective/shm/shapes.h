#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>

#include "collective/shm/control.h"

/// Shapes in shared memory. A peer wrote them: they are checked before memory is allocated for them.
namespace torchspan::collective::shm {

/// Throws kUnsupported for more than kMostDimensions.
void put_sizes(Call& call, at::IntArrayRef sizes);
/// The shape of the call's contribution; throws kInvalid unless it has call.bytes bytes.
std::vector<std::int64_t> get_sizes(const Call& call, std::size_t item);
/// Checks a size before memory is allocated for it; throws kInvalid for one that no machine has.
std::size_t checked_size(std::uint64_t bytes);

void write_shape(ByteWriter& writer, at::IntArrayRef sizes);

/// One of several tensors in a row.
struct PartOfRow {
  std::uint64_t offset = 0;
  std::vector<std::int64_t> sizes = {};
};
/// Returns the part at `index`, out of `count` shapes.
PartOfRow read_part(BytesView shapes, std::size_t index, std::size_t count, std::size_t item);

/// The sparse tensors of all ranks, as they arrive.
struct SparseParts {
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;

  /// The number of sparse dimensions of the sum: that of the tensors that have entries.
  static std::uint32_t sparse_dimensions(const std::vector<Call>& calls);
  /// Allocates memory for a rank's entries.
  void add(const Call& call, std::uint32_t sparse_dimensions, at::ScalarType dtype);
  /// The coalesced sum, divided by `divisor`.
  at::Tensor sum(at::IntArrayRef sizes, int divisor) const;
};

}  // namespace torchspan::collective::shm
