#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>

#include "collective/shm/control.h"

/// Shapes as they stand in shared memory. What is read was written by a peer: it is checked before memory is
/// asked for by it.
namespace torchspan::collective::shm {

/// Throws kUnsupported for more than kMostDimensions.
void put_sizes(Call& call, at::IntArrayRef sizes);
/// The shape of what the call contributes; kInvalid unless it has call.bytes bytes.
std::vector<std::int64_t> get_sizes(const Call& call, std::size_t item);
/// A length to allocate by; throws kInvalid for one that no machine has.
std::size_t checked_size(std::uint64_t bytes);

void write_shape(ByteWriter& writer, at::IntArrayRef sizes);

/// One of several tensors that follow each other.
struct PartOfRow {
  std::uint64_t offset = 0;
  std::vector<std::int64_t> sizes = {};
};
/// The part with this index out of `count` shapes.
PartOfRow read_part(BytesView shapes, std::size_t index, std::size_t count, std::size_t item);

/// The sparse tensors of all ranks while they arrive.
struct SparseParts {
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;

  /// How many of the dimensions are sparse in the sum: as many as in the tensors that have entries.
  static std::uint32_t sparse_dimensions(const std::vector<Call>& calls);
  /// Makes room for a rank's entries.
  void add(const Call& call, std::uint32_t sparse_dimensions, at::ScalarType dtype);
  /// The coalesced sum, divided by `divisor`.
  at::Tensor sum(at::IntArrayRef sizes, int divisor) const;
};

}  // namespace torchspan::collective::shm
