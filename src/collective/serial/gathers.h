#pragma once
#include <cstdint>
#include <vector>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Views the memory of a contiguous tensor, or of any other object, as bytes.
at::Tensor bytes_of(const at::Tensor& tensor);
at::Tensor bytes_of(void* data, std::size_t size);
at::Tensor empty_bytes(at::IntArrayRef sizes);

/// Gathers data of different lengths over an engine that gathers rows of one length.
class Gathers {
 public:
  /// `collectives` must outlive this object.
  Gathers(BlockingCollectives& collectives, int rank, int size)
      : collectives_(collectives), rank_(rank), size_(size) {}

  /// By rank; every rank gives the same count of numbers.
  std::vector<std::vector<std::int64_t>> numbers(std::vector<std::int64_t> mine) const;
  std::vector<Bytes> bytes(BytesView mine) const;
  /// Gathers tensors that may differ in their first dimension.
  std::vector<at::Tensor> dense(const at::Tensor& tensor) const;
  /// The same if the number of rows of each rank is known.
  std::vector<at::Tensor> dense(const at::Tensor& tensor, const std::vector<std::int64_t>& rows) const;

 private:
  BlockingCollectives& collectives_;
  const int rank_;
  const int size_;
};

}  // namespace torchspan::collective
