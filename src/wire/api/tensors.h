#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan::wire {

/// A tensor table ready to be sent: a description of every tensor, and the bytes of those that have any.
struct PackedTensors {
  Bytes metadata;                 ///< empty for an empty table
  std::vector<Segment> segments;  ///< in the order the metadata needs them; none is empty
};

struct PackOptions {
  /// On which device of the receiver's a tensor shall live that lives on that device here; unset: the
  /// receiver decides, who is told where it lived. What it throws ends pack().
  std::function<c10::Device(c10::Device here)> place = {};
};

/// Describes tensors and points at their bytes. Copies only what cannot be sent as it lies: views with gaps,
/// lazily conjugated or negated tensors, tensors of other devices (they travel by way of the CPU). A segment
/// of such a private copy has `keep`; one that borrows the caller's storage, for the duration of send(), has
/// not.
/// Expanded dimensions are sent once. Layouts other than strided and sparse COO, named dimensions, meta
/// tensors and tensor wrappers without storage: Error{kUnsupported} that names the tensor's index and the
/// reason.
PackedTensors pack(std::span<const at::Tensor> tensors, PackOptions options = {});

struct UnpackOptions {
  /// Where a tensor that left that device shall live here, if its sender did not say; unset: on the CPU.
  std::function<c10::Device(c10::Device sent_from)> place = {};
};

/// Why no tensor can live on `device` in this process: "this process has 1 cuda device". Empty when one can.
std::string why_absent(c10::Device device);

/// Rebuilds the tensors that pack() described. Takes each buffer over as a tensor's storage without a copy;
/// the tensor is writable, resizable and shares nothing with the sender. Dtype, sizes, strides, expanded
/// dimensions, sparse layout, quantization and requires_grad are those of the sender; a tensor that required
/// grad is a leaf here. Copies to a device are complete when this returns. Any metadata and buffers that do
/// not fit together exactly are Error{kInvalid}; a dtype unknown to this build is Error{kUnsupported}.
std::vector<at::Tensor> unpack(BytesView metadata, std::span<Buffer> segments,
                               const UnpackOptions& options = {});

}  // namespace torchspan::wire
