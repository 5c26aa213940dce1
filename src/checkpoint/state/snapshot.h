#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/checkpoint/state.h>
#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

#include "checkpoint/commit/listing.h"

namespace torchspan::checkpoint {

/// The tensors of a rank as parts of tensors.
Listing listing_of(const std::vector<StateTensor>& tensors);

/// The bytes that a rank writes: copies of its tensors, or the tensors themselves.
class Snapshot {
 public:
  /// Copies the tensors of the share, in the order of its entries, into one buffer, which later calls reuse.
  void copy(const std::vector<StateTensor>& tensors, const Plan::Share& share);
  /// Refers to the tensors, which must not change until release(); copies only those that are not contiguous
  /// or not on the CPU.
  void borrow(const std::vector<StateTensor>& tensors, const Plan::Share& share);
  /// Drops references to tensors.
  void release();

  /// By entry of the share.
  const std::vector<BytesView>& data() const { return data_; }

 private:
  Buffer buffer_;
  std::vector<at::Tensor> held_;
  std::vector<BytesView> data_;
};

}  // namespace torchspan::checkpoint
