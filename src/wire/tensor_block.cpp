#include "wire/tensor_block.h"

#include <algorithm>
#include <bit>
#include <fmt/format.h>
#include <memory>
#include <numeric>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/quantized/QTensorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"
#include "device/api/tensors.h"
#include "wire/compat.h"

namespace torchspan::wire {
namespace {

constexpr std::size_t kMaxDimensions = 64;
/// A longer stride would exceed every address space; dimensions of one element may have any.
constexpr std::int64_t kMaxStride = std::int64_t{1} << 48;
/// Bit 0 of a block's layout byte; the other bits are 0.
constexpr std::uint8_t kStridesFollow = 1;

std::size_t elements_per_byte(at::ScalarType dtype) {
  if (dtype == at::kQUInt4x2) return 2;
  if (dtype == at::kQUInt2x4) return 4;
  return 1;
}

bool is_expanded(std::int64_t size, std::int64_t stride) { return size > 1 && stride == 0; }

/// True unless the product of `factors`, zeros left out, and `element_size` is 2^63 or more.
bool product_fits(at::IntArrayRef factors, std::size_t element_size) {
  auto product = static_cast<std::int64_t>(element_size);
  for (const std::int64_t factor : factors) {
    if (factor > 0 && __builtin_mul_overflow(product, factor, &product)) return false;
  }
  return true;
}

/// The dimensions that affect where elements lie, innermost first.
at::DimVector dimensions_by_stride(at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::DimVector order;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != 0) order.push_back(static_cast<std::int64_t>(i));
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return strides[a] < strides[b]; });
  return order;
}

/// An unsigned type of that size: copies bytes of any dtype, also where LibTorch has no copy kernel.
at::ScalarType type_of_size(std::size_t size) {
  switch (size) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

/// The tensor's elements without gaps, in newly allocated memory.
at::Tensor without_gaps(const at::Tensor& tensor, const BlockShape& shape) {
  at::DimVector sizes = shape.sizes;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (is_expanded(sizes[i], shape.strides[i])) sizes[i] = 1;
  }
  const at::ScalarType raw = type_of_size(tensor.element_size());
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                              c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                              c10::scalarTypeToTypeMeta(raw));
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, tensor.strides());
  return at::empty_strided(sizes, shape.strides, raw).copy_(alias);
}

at::DispatchKey key_for(at::ScalarType dtype) {
  return c10::isQIntType(dtype) ? c10::DispatchKey::QuantizedCPU : c10::DispatchKey::CPU;
}

c10::DataPtr adopt_memory(Buffer buffer) {
  auto owner = std::make_unique<std::shared_ptr<void>>(std::move(buffer.owner));
  return {buffer.data, owner.release(),
          [](void* context) { delete static_cast<std::shared_ptr<void>*>(context); }, c10::Device(c10::kCPU)};
}

}  // namespace

std::size_t BlockShape::bytes() const {
  std::size_t count = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (!is_expanded(sizes[i], strides[i])) count *= static_cast<std::size_t>(sizes[i]);
  }
  const std::size_t packed = elements_per_byte(dtype);
  if (packed > 1 && !sizes.empty()) {
    const auto row = static_cast<std::size_t>(sizes.back());  // every row starts at a new byte
    return row == 0 ? 0 : count / row * ((row + packed - 1) / packed);
  }
  return count * c10::elementSize(dtype);
}

bool BlockShape::is_row_major() const {
  std::int64_t expected = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    expected *= std::max<std::int64_t>(sizes[i], 1);
  }
  return true;
}

bool is_dense_but_expanded(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const bool in_range =
      std::ranges::all_of(strides, [](std::int64_t stride) { return stride >= 0 && stride <= kMaxStride; });
  if (!in_range) return false;
  if (std::ranges::find(sizes, 0) != sizes.end()) return true;
  std::int64_t expected = 1;
  for (const std::int64_t dimension : dimensions_by_stride(sizes, strides)) {
    if (strides[dimension] != expected) return false;
    expected *= sizes[dimension];
  }
  return true;
}

at::DimVector dense_strides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::DimVector dense(sizes.size(), 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (is_expanded(sizes[i], strides[i])) dense[i] = 0;
  }
  std::int64_t next = 1;
  for (const std::int64_t dimension : dimensions_by_stride(sizes, strides)) {
    dense[dimension] = next;
    next *= std::max<std::int64_t>(sizes[dimension], 1);
  }
  return dense;
}

void check_shape(at::IntArrayRef sizes, std::size_t element_size) {
  if (sizes.size() > kMaxDimensions || !product_fits(sizes, element_size)) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("a tensor of sizes [{}] cannot be sent: the wire carries up to {} dimensions and 2^63 "
                    "bytes, counted as if nothing were expanded or empty",
                    fmt::join(sizes, ", "), kMaxDimensions));
  }
}

void put_block(ByteWriter& metadata, std::vector<Segment>& segments, const at::Tensor& tensor, bool keep) {
  const at::ScalarType dtype = tensor.scalar_type();
  BlockShape shape{dtype, at::DimVector(tensor.sizes()), at::DimVector(tensor.strides())};
  check_shape(shape.sizes, tensor.element_size());
  at::Tensor source = tensor;
  if (elements_per_byte(dtype) > 1) {
    if (!shape.is_row_major() || tensor.storage_offset() != 0) {
      throw Error(ErrorKind::kUnsupported,
                  fmt::format("a view of a {} tensor cannot be sent; make a contiguous copy of it first",
                              c10::toString(dtype)));
    }
  } else if (!is_dense_but_expanded(shape.sizes, shape.strides)) {
    shape.strides = dense_strides(shape.sizes, shape.strides);
    source = without_gaps(tensor, shape);
    keep = true;
  }
  const bool row_major = shape.is_row_major();
  metadata.put(dtype_code(dtype));
  metadata.put(row_major ? std::uint8_t{0} : kStridesFollow);
  metadata.put(static_cast<std::uint8_t>(shape.sizes.size()));
  metadata.put_bytes(std::as_bytes(std::span(shape.sizes.data(), shape.sizes.size())));
  if (!row_major) metadata.put_bytes(std::as_bytes(std::span(shape.strides.data(), shape.strides.size())));
  const std::size_t bytes = shape.bytes();
  if (bytes == 0) return;
  Segment segment{static_cast<const std::byte*>(compat::const_data(source)), bytes, nullptr};
  if (keep) segment.keep = std::make_shared<const at::Tensor>(std::move(source));
  segments.push_back(std::move(segment));
}

BlockShape get_block(ByteReader& metadata) {
  BlockShape shape;
  shape.dtype = dtype_from_code(metadata.get<std::uint8_t>());
  if (shape.dtype == at::ScalarType::Undefined) throw_invalid("a received tensor has no dtype");
  const auto layout = metadata.get<std::uint8_t>();
  if (layout > kStridesFollow) throw_invalid("a received tensor has the unknown layout {}", layout);
  const std::size_t dimensions = metadata.get<std::uint8_t>();
  if (dimensions > kMaxDimensions) throw_invalid("a received tensor has {} dimensions", dimensions);
  const auto get_vector = [&] {
    at::DimVector values(dimensions);
    for (std::int64_t& value : values) value = metadata.get<std::int64_t>();
    return values;
  };
  shape.sizes = get_vector();
  const bool negative = std::ranges::any_of(shape.sizes, [](std::int64_t size) { return size < 0; });
  if (negative || !product_fits(shape.sizes, c10::elementSize(shape.dtype))) {
    throw_invalid("a received tensor has the impossible sizes [{}]", fmt::join(shape.sizes, ", "));
  }
  if (layout == kStridesFollow) {
    shape.strides = get_vector();
    if (!is_dense_but_expanded(shape.sizes, shape.strides) || elements_per_byte(shape.dtype) > 1) {
      throw_invalid("a received tensor of sizes [{}] has the impossible strides [{}]",
                    fmt::join(shape.sizes, ", "), fmt::join(shape.strides, ", "));
    }
  } else {
    shape.strides.resize(dimensions);
    std::int64_t next = 1;
    for (std::size_t i = dimensions; i-- > 0;) {
      shape.strides[i] = next;
      next *= std::max<std::int64_t>(shape.sizes[i], 1);
    }
  }
  return shape;
}

const DeviceSegment* BufferQueue::next_on_device() const {
  const auto found = std::ranges::find(on_device_, next_, &DeviceSegment::index);
  return found == on_device_.end() ? nullptr : &*found;
}

Buffer BufferQueue::take(std::size_t size, std::size_t element_size) {
  if (next_on_device() != nullptr)
    throw_invalid("a part of a tensor that the host reads was received in device memory");
  return take_on_device(size, element_size);
}

Buffer BufferQueue::take_on_device(std::size_t size, std::size_t element_size) {
  if (next_ == buffers_.size()) {
    throw_invalid("tensors need more than the {} received segments", buffers_.size());
  }
  Buffer& buffer = buffers_[next_++];
  if (buffer.size != size || buffer.data == nullptr || buffer.owner == nullptr) {
    throw_invalid("a tensor of {} bytes was received in a segment of {}", size, buffer.size);
  }
  // c10::complex<double> must be aligned to its size, 16 bytes.
  if (std::bit_cast<std::uintptr_t>(buffer.data) % element_size != 0) {
    throw_invalid("a segment's address is not aligned to the {} bytes of its elements", element_size);
  }
  return std::exchange(buffer, Buffer{});
}

void BufferQueue::expect_end() const {
  if (next_ != buffers_.size()) {
    throw_invalid("{} segments were received, but the tensors need {}", buffers_.size(), next_);
  }
}

at::Tensor adopt_block(const BlockShape& shape, BufferQueue& buffers, at::QuantizerPtr quantizer) {
  const std::size_t bytes = shape.bytes();
  c10::DataPtr memory(nullptr, c10::Device(c10::kCPU));
  if (bytes > 0) memory = adopt_memory(buffers.take(bytes, c10::elementSize(shape.dtype)));
  // With the allocator, resize_() can move the tensor to a larger storage like any other.
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), c10::GetCPUAllocator(),
                       true);
  const c10::DispatchKeySet keys(key_for(shape.dtype));
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(shape.dtype);
  at::Tensor tensor = quantizer ? at::detail::make_tensor<at::QTensorImpl>(std::move(storage), keys, type,
                                                                           std::move(quantizer))
                                : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  return tensor;
}

at::Tensor view_device_block(const BlockShape& shape, BufferQueue& buffers) {
  const c10::Device device = buffers.next_on_device()->device;
  Buffer buffer = buffers.take_on_device(shape.bytes(), c10::elementSize(shape.dtype));
  return device::view_memory(buffer.data, shape.sizes, shape.strides, shape.dtype, device,
                             std::move(buffer.owner));
}

at::Tensor take_device_tensor(const BlockShape& shape, BufferQueue& buffers) {
  const Buffer buffer = buffers.take_on_device(shape.bytes(), c10::elementSize(shape.dtype));
  const at::Tensor owner = std::move(*std::static_pointer_cast<at::Tensor>(buffer.owner));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(owner.storage()), owner.key_set(),
                                                               c10::scalarTypeToTypeMeta(shape.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  return tensor;
}

}  // namespace torchspan::wire
