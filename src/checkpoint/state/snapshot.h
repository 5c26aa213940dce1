#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/checkpoint/state.h>
#include <torchspan/core/bytes.h>
#include <torchspan/detail/device/copies.h>

#include "checkpoint/commit/listing.h"
#include "checkpoint/state/host_blocks.h"

namespace torchspan::checkpoint {

/// The tensors of a rank as parts of tensors. Throws Error{kUnsupported} naming one whose dtype the safetensors format
/// lacks.
Listing listing_of(const std::vector<StateTensor>& tensors);

/// The bytes that a rank writes: copies of its tensors, or the tensors themselves.
class Snapshot {
 public:
  /// Copies the tensors of the share, in the order of its entries, into memory that later calls reuse. Does not wait
  /// for devices with streams: the copies have the values after the current streams' work so far. For CUDA tensors
  /// the memory is pinned.
  void copy(const std::vector<StateTensor>& tensors, const Plan::Share& share);
  /// Refers to the tensors, which must not change until release(); copies only those that are not contiguous
  /// or not on the CPU.
  void borrow(const std::vector<StateTensor>& tensors, const Plan::Share& share);
  /// Drops references to tensors; waits for copies, also of devices that have failed.
  void release();

  /// The bytes in the order of the share's entries, those of an entry in one or more pieces. Waits for copies; throws
  /// if a device has failed before it completed them.
  const std::vector<BytesView>& data();

 private:
  void copy_to(std::byte* place, const at::Tensor& tensor);

  device::CopyStreams streams_;
  HostBlocks memory_;
  std::vector<at::Tensor> held_;
  device::PendingCopies copies_;
  std::vector<BytesView> data_;
};

}  // namespace torchspan::checkpoint
