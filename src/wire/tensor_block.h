#pragma once
#include <cstdint>
#include <span>

#include <ATen/core/ivalue.h>
#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/quantized/Quantizer.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan::wire {

/// Where elements lie: what a block's description says of a tensor that is dense but for expanded dimensions,
/// those longer than 1 with stride 0, whose one copy is sent once.
struct BlockShape {
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::DimVector sizes;
  at::DimVector strides;

  /// Bytes that travel: of all elements, expanded dimensions counted once.
  std::size_t bytes() const;
  /// Strides are those of a fresh row-major tensor, which need not be written down.
  bool is_row_major() const;
};

/// True when the elements fill their memory without gaps or overlaps, expanded dimensions aside.
bool is_dense_but_expanded(at::IntArrayRef sizes, at::IntArrayRef strides);

/// Strides without gaps that keep the order in which dimensions are nested; expanded ones stay expanded.
at::DimVector dense_strides(at::IntArrayRef sizes, at::IntArrayRef strides);

/// Throws Error{kUnsupported} for a shape that the wire does not carry: more than 64 dimensions, or more than
/// 2^63 bytes even when it is empty or expanded.
void check_shape(at::IntArrayRef sizes, std::size_t element_size);

/// Appends a block's description to `metadata` and, unless it is empty, its bytes to `segments`. `tensor` is
/// strided and on the CPU. `keep`: the segment shall hold the tensor's memory, even if it was not copied.
void put_block(ByteWriter& metadata, std::vector<Segment>& segments, const at::Tensor& tensor, bool keep);

/// Reads what put_block wrote; a description that put_block does not write throws Error{kInvalid}.
BlockShape get_block(ByteReader& metadata);

/// Hands out received buffers, each one once.
class BufferQueue {
 public:
  explicit BufferQueue(std::span<Buffer> buffers) : buffers_(buffers) {}
  /// The next buffer, which must hold `size` bytes aligned for `element_size`; Error{kInvalid} otherwise.
  Buffer take(std::size_t size, std::size_t element_size);
  /// Throws Error{kInvalid} when buffers are left.
  void expect_end() const;

 private:
  std::span<Buffer> buffers_;
  std::size_t next_ = 0;
};

/// A tensor of that shape that lives in the next buffer. With a quantizer it is a quantized tensor.
at::Tensor adopt_block(const BlockShape& shape, BufferQueue& buffers, at::QuantizerPtr quantizer = {});

}  // namespace torchspan::wire
