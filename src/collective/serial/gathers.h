#pragma once
#include <cstdint>
#include <vector>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// The memory of a contiguous tensor, or any other, as bytes.
at::Tensor bytes_of(const at::Tensor& tensor);
at::Tensor bytes_of(void* data, std::size_t size);
at::Tensor empty_bytes(at::IntArrayRef sizes);

/// Gathers what ranks have different amounts of, over a collectives that gathers rows of one length.
class Gathers {
 public:
  /// `collectives` outlives it.
  Gathers(BlockingCollectives& collectives, int rank, int size)
      : collectives_(collectives), rank_(rank), size_(size) {}

  /// By rank; the same count of numbers on every rank.
  std::vector<std::vector<std::int64_t>> numbers(std::vector<std::int64_t> mine) const;
  std::vector<Bytes> bytes(BytesView mine) const;
  /// Tensors that may differ in their first dimension.
  std::vector<at::Tensor> dense(const at::Tensor& tensor) const;
  /// The same when it is known how many rows each rank has.
  std::vector<at::Tensor> dense(const at::Tensor& tensor, const std::vector<std::int64_t>& rows) const;

 private:
  BlockingCollectives& collectives_;
  const int rank_;
  const int size_;
};

}  // namespace torchspan::collective
