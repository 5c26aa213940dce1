#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/device/copies.h>

namespace torchspan::wire {

/// A tensor table ready to be sent: a description of every tensor, and the bytes of those that are not empty.
struct PackedTensors {
  Bytes metadata;                 ///< empty for an empty table
  std::vector<Segment> segments;  ///< in the order the metadata needs them; none is empty
  /// By each tensor that PackOptions::share took: its place among the segments, shared ones included.
  std::vector<std::size_t> shared;
  device::PendingCopies copies;  ///< the bytes are ready when these are complete

  /// Copies the bytes that segments borrow, so that they may be sent after the tensors changed or are gone. Throws
  /// Error{kOverloaded} when out of memory.
  void own_memory();
};

struct PackOptions {
  /// Maps the device of a tensor here to its device on the receiver. If unset, the receiver decides and gets
  /// the device of the tensor here. An exception from it ends pack().
  std::function<c10::Device(c10::Device here)> place = {};
  /// Copies tensors of devices with streams to the host; pack() does not wait for these copies. Null: pack()
  /// waits for the current stream.
  device::CopyStreams* copies = nullptr;
  /// Offered each strided tensor of a device with streams that is not empty, if `copies` is set. Returns a dense
  /// tensor of the same sizes and dtype in memory that the receiver maps or is given, which the pending copies
  /// fill, or an undefined tensor.
  std::function<at::Tensor(const at::Tensor&, device::PendingCopies&)> share = {};
};

/// Describes tensors and points at their bytes. Copies only views with gaps, lazily conjugated or negated
/// tensors, and tensors of other devices (which are sent through the CPU); the segment of a copy has `keep`,
/// any other borrows the caller's storage until send() returns. Sends expanded dimensions once. Throws
/// Error{kUnsupported} with the tensor's index for layouts other than strided and sparse COO, named
/// dimensions, meta tensors and wrappers without storage.
PackedTensors pack(std::span<const at::Tensor> tensors, PackOptions options = {});

/// A segment in device memory instead of host memory.
struct DeviceSegment {
  enum class Memory : std::uint8_t {
    kShared,  ///< of another process: it is copied, and its owner released when the copy is complete
    /// Allocated for this message: the owner is a std::shared_ptr<at::Tensor> of bytes, which becomes the result's
    /// storage unless that is on another device.
    kReceived,
    kTensor,  ///< of this process: the owner is a std::shared_ptr<at::Tensor>, which is moved into the result
  };
  std::size_t index = 0;  ///< among the segments
  c10::Device device = c10::kCPU;
  Memory memory = Memory::kShared;
};

struct UnpackOptions {
  /// Maps a tensor's device on the sender to its device here, if the sender did not choose one; unset: the
  /// CPU, or the device of its segment in device memory.
  std::function<c10::Device(c10::Device sent_from)> place = {};
  /// Copies tensors to devices with streams, beside their other work. Null: on the current stream.
  device::CopyStreams* copies = nullptr;
  /// The segments in device memory, by ascending index. They need `copies`.
  std::span<const DeviceSegment> on_device = {};
};

/// Rebuilds the tensors that pack() described. Each buffer becomes a tensor's storage without a copy; the
/// tensor is writable and resizable, and has the sender's dtype, sizes, strides, expanded dimensions, sparse
/// layout, quantization and requires_grad (as a leaf). Copies to a device are complete on return. Throws
/// Error{kInvalid} if metadata and buffers do not match exactly, Error{kUnsupported} for a dtype unknown to
/// this build.
std::vector<at::Tensor> unpack(BytesView metadata, std::span<Buffer> segments,
                               const UnpackOptions& options = {});

}  // namespace torchspan::wire
