#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>

#include "collective/shm/control.h"

/// Shapes in shared memory. Peers write them, so they are checked before memory is allocated by them.
namespace torchspan::collective::shm {

/// Throws kUnsupported for more than kMostDimensions.
void put_sizes(Call& call, at::IntArrayRef sizes);
/// Returns the shape of the call's contribution; throws kInvalid unless it has call.bytes bytes.
std::vector<std::int64_t> get_sizes(const Call& call, std::size_t item);
/// Returns a length for an allocation; throws kInvalid if no machine has that much memory.
std::size_t checked_size(std::uint64_t bytes);

void write_shape(ByteWriter& writer, at::IntArrayRef sizes);

/// One of several consecutive tensors.
struct PartOfRow {
  std::uint64_t offset = 0;
  std::vector<std::int64_t> sizes = {};
};
/// Returns the shape at this index out of `count` shapes.
PartOfRow read_part(BytesView shapes, std::size_t index, std::size_t count, std::size_t item);

/// Collects the sparse tensors of all ranks.
struct SparseParts {
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;

  /// The number of sparse dimensions of the sum: that of the tensors that have entries.
  static std::uint32_t sparse_dimensions(const std::vector<Call>& calls);
  /// Allocates space for a rank's entries.
  void add(const Call& call, std::uint32_t sparse_dimensions, at::ScalarType dtype);
  /// Returns the coalesced sum, divided by `divisor`.
  at::Tensor sum(at::IntArrayRef sizes, int divisor) const;
};

}  // namespace torchspan::collective::shm
