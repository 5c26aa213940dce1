#pragma once
#include <functional>
#include <span>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/core/buffer.h>
#include <torchspan/core/bytes.h>

namespace torchspan::wire {

/// A tensor table ready to be sent: a description of every tensor, and the bytes of those that have any.
struct PackedTensors {
  Bytes metadata;                 ///< empty for an empty table
  std::vector<Segment> segments;  ///< in the order the metadata needs them; none is empty
};

struct PackOptions {
  /// The tensors are nobody else's (results of a call): segments keep them alive, so a transport may go on
  /// sending after send() returned. Otherwise the caller's memory is borrowed for the duration of send().
  bool exclusive = false;
};

/// Describes tensors and points at their bytes. Copies only what cannot be sent as it lies: views with gaps,
/// lazily conjugated or negated tensors, tensors of other devices (they travel by way of the CPU). A segment
/// of such a private copy has `keep`; one that borrows the caller's storage has not (see PackOptions).
/// Expanded dimensions are sent once. Layouts other than strided and sparse COO, named dimensions, meta
/// tensors and tensor wrappers without storage: Error{kUnsupported} that names the tensor's index and the
/// reason.
PackedTensors pack(std::span<const at::Tensor> tensors, PackOptions options = {});

struct UnpackOptions {
  /// Where a tensor that left a device other than the CPU shall live here; unset: on the CPU.
  std::function<c10::Device(c10::Device sent_from)> place;
};

/// Rebuilds the tensors that pack() described. Takes each buffer over as a tensor's storage without a copy;
/// the tensor is writable, resizable and shares nothing with the sender. Dtype, sizes, strides, expanded
/// dimensions, sparse layout, quantization and requires_grad are those of the sender; a tensor that required
/// grad is a leaf here. Any metadata and buffers that do not fit together exactly are Error{kInvalid}; a
/// dtype unknown to this build is Error{kUnsupported}.
std::vector<at::Tensor> unpack(BytesView metadata, std::span<Buffer> segments,
                               const UnpackOptions& options = {});

}  // namespace torchspan::wire
