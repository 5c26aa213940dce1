#pragma once
#include <cstdint>
#include <span>

#include <ATen/core/ivalue.h>
#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/quantized/Quantizer.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

#include "wire/api/tensors.h"

namespace torchspan::wire {

/// The positions of a tensor's elements. The tensor is dense except for expanded dimensions: those longer
/// than 1 with stride 0, whose single copy is sent once.
struct BlockShape {
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::DimVector sizes;
  at::DimVector strides;

  /// Returns the bytes to send: of all elements, with expanded dimensions counted once.
  std::size_t bytes() const;
  /// Whether the strides are those of a new row-major tensor, which are not encoded.
  bool is_row_major() const;
};

/// True when the elements fill their memory without gaps or overlaps, expanded dimensions aside.
bool is_dense_but_expanded(at::IntArrayRef sizes, at::IntArrayRef strides);

/// Strides without gaps that keep the order in which dimensions are nested; expanded ones stay expanded.
at::DimVector dense_strides(at::IntArrayRef sizes, at::IntArrayRef strides);

/// Throws Error{kUnsupported} for a shape that cannot be encoded: more than 64 dimensions, or more than 2^63
/// bytes even if it is empty or expanded.
void check_shape(at::IntArrayRef sizes, std::size_t element_size);

/// Appends a block's description to `metadata` and, unless it is empty, its bytes to `segments`. `tensor`
/// must be strided and on the CPU. With `keep`, the segment holds the tensor's memory even if it was not
/// copied.
void put_block(ByteWriter& metadata, std::vector<Segment>& segments, const at::Tensor& tensor, bool keep);

/// Reads what put_block wrote; throws Error{kInvalid} for any other description.
BlockShape get_block(ByteReader& metadata);

/// Returns received buffers, each one once.
class BufferQueue {
 public:
  BufferQueue(std::span<Buffer> buffers, std::span<const DeviceSegment> on_device)
      : buffers_(buffers), on_device_(on_device) {}
  /// What is said of the next buffer, if it is on a device; null for host memory.
  const DeviceSegment* next_on_device() const;
  /// Returns the next buffer, in host memory; throws Error{kInvalid} unless it has `size` bytes, aligned for
  /// `element_size`.
  Buffer take(std::size_t size, std::size_t element_size);
  /// The same for a buffer on a device.
  Buffer take_on_device(std::size_t size, std::size_t element_size);
  /// Throws Error{kInvalid} when buffers are left.
  void expect_end() const;

 private:
  std::span<Buffer> buffers_;
  std::span<const DeviceSegment> on_device_;
  std::size_t next_ = 0;
};

/// A tensor of that shape in the next buffer. With a quantizer it is a quantized tensor.
at::Tensor adopt_block(const BlockShape& shape, BufferQueue& buffers, at::QuantizerPtr quantizer = {});

/// A view of the next buffer, which is on a device and must not be empty.
at::Tensor view_device_block(const BlockShape& shape, BufferQueue& buffers);

/// A tensor of that shape with the storage of the one that owns the next buffer, which is moved out of the owner.
at::Tensor take_device_tensor(const BlockShape& shape, BufferQueue& buffers);

}  // namespace torchspan::wire
