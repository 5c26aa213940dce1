#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// The memory of a contiguous tensor, or any memory, as a tensor of bytes.
at::Tensor bytes_of(const at::Tensor& tensor);
at::Tensor bytes_of(void* data, std::size_t size);
at::Tensor empty_bytes(at::IntArrayRef sizes);

/// blocks[rank] has the bytes of that rank; fills in those of the others. All ranks know the sizes, which may differ.
void gather_blocks(BlockingCollectives& collectives, const std::vector<at::Tensor>& blocks, int rank);

/// Gathers data of different sizes, over BlockingCollectives, which gather rows of equal length.
class Gathers {
 public:
  /// `collectives` must outlive this object.
  Gathers(BlockingCollectives& collectives, int rank, int size)
      : collectives_(collectives), rank_(rank), size_(size) {}

  /// Returns the numbers of every rank; all ranks pass equally many.
  std::vector<std::vector<std::int64_t>> numbers(std::vector<std::int64_t> mine) const;
  std::vector<Bytes> bytes(BytesView mine) const;
  /// Tensors that may differ in their first dimension.
  std::vector<at::Tensor> dense(const at::Tensor& tensor) const;
  /// The same if the number of rows of each rank is known.
  std::vector<at::Tensor> dense(const at::Tensor& tensor, const std::vector<std::int64_t>& rows) const;

 private:
  BlockingCollectives& collectives_;
  const int rank_;
  const int size_;
};

/// Reduces in place, in the order of ranks.
void reduce_gathered(BlockingCollectives& collectives, const at::Tensor& tensor, ReduceOp reduction,
                     int ranks);

/// Returns the coalesced sum of sparse tensors, whose entries may differ, divided by `divisor`. Throws as
/// common_sparse_dim().
at::Tensor reduce_sparse(const Gathers& gathers, const at::Tensor& tensor, const std::string& line,
                         std::int64_t divisor, const std::vector<std::string>& peers);

}  // namespace torchspan::collective
