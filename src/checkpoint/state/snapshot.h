#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/checkpoint/state.h>
#include <torchspan/core/bytes.h>
#include <torchspan/detail/device/copies.h>

#include "checkpoint/commit/listing.h"

namespace torchspan::checkpoint {

/// The tensors of a rank as parts of tensors.
Listing listing_of(const std::vector<StateTensor>& tensors);

/// The bytes that a rank writes: copies of its tensors, or the tensors themselves.
class Snapshot {
 public:
  /// Copies the tensors of the share, in the order of its entries, into one buffer, which later calls reuse. Does
  /// not wait for devices with streams: the copies have the values after the current streams' work so far. For
  /// CUDA tensors the buffer is pinned.
  void copy(const std::vector<StateTensor>& tensors, const Plan::Share& share);
  /// Refers to the tensors, which must not change until release(); copies only those that are not contiguous
  /// or not on the CPU.
  void borrow(const std::vector<StateTensor>& tensors, const Plan::Share& share);
  /// Drops references to tensors; waits for copies, also of devices that have failed.
  void release();

  /// By entry of the share. Waits for copies; throws if a device has failed before it completed them.
  const std::vector<BytesView>& data();

 private:
  std::byte* room_for(std::size_t bytes, bool pinned);

  device::CopyStreams streams_;
  at::Tensor buffer_;
  std::vector<at::Tensor> held_;
  device::PendingCopies copies_;
  std::vector<BytesView> data_;
};

}  // namespace torchspan::checkpoint
