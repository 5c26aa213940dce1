#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/bytes.h>
#include <torchspan/detail/device/copies.h>

#include "checkpoint/commit/listing.h"

namespace torchspan::checkpoint {

/// Sizes of blocks that together have room for `bytes`. LibTorch's allocator of pinned memory rounds sizes up to
/// powers of two, newer releases only up to a threshold; these are powers of two, and exceed `bytes` by at most a
/// sixteenth, or 4 KiB.
std::vector<std::size_t> pinned_block_sizes(std::size_t bytes);

/// Host memory of one snapshot after the other. Its bytes have consecutive numbers from 0, and lie in one block of
/// memory, or in several where it is pinned.
class HostBlocks {
 public:
  /// For which copies the memory is used.
  enum class Use {
    kHost,    ///< one block
    kDevice,  ///< blocks of pinned_block_sizes(): copies from any device are divided as those from GPUs
    kPinned   ///< the same, pinned
  };
  /// Returns `bytes` bytes of host memory.
  using Allocate = std::function<at::Tensor(std::size_t bytes, bool pinned)>;

  HostBlocks();
  explicit HostBlocks(Allocate allocate) : allocate_(std::move(allocate)) {}
  /// Makes room for `bytes`. Keeps the memory if it is large enough and pinned where that is asked for, else replaces
  /// it: nothing may use it then.
  void reserve(std::size_t bytes, Use use);
  /// The memory of the bytes from `begin` on: one piece for each block that has some of them. None for no bytes.
  std::vector<std::span<std::byte>> pieces(std::size_t begin, std::size_t count) const;
  std::size_t capacity() const;

 private:
  Allocate allocate_;
  std::vector<at::Tensor> blocks_;
  Use use_ = Use::kHost;
};

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
