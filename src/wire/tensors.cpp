#include "wire/api/tensors.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"
#include "device/api/devices.h"
#include "wire/compat.h"
#include "wire/tensor_block.h"

namespace torchspan::wire {
namespace {

enum class TensorKind : std::uint8_t { kUndefined = 0, kStrided = 1, kSparseCoo = 2, kQuantized = 3 };
enum class Scheme : std::uint8_t { kPerTensor = 0, kPerChannel = 1 };

constexpr std::uint8_t kRequiresGrad = 1, kDeviceFollows = 2, kCoalesced = 4, kPlaced = 8;

[[noreturn]] void throw_unsupported(std::string text) {
  throw Error(ErrorKind::kUnsupported, std::move(text));
}

void check_sendable(const at::Tensor& tensor) {
  const c10::Layout layout = tensor.layout();
  if (layout != c10::kStrided && layout != c10::kSparse) {
    throw_unsupported(fmt::format(
        "layout {} is not supported; convert the tensor to a strided or sparse COO one", c10::str(layout)));
  }
  if (compat::has_names(tensor)) {
    throw_unsupported("named dimensions are not supported; send tensor.rename(at::nullopt)");
  }
  if (tensor.is_meta()) throw_unsupported("a meta tensor has no data to send");
  const bool is_wrapper = layout == c10::kStrided && !tensor.has_storage();
  if (is_wrapper || tensor.is_nested()) {
    throw_unsupported("nested tensors and wrappers around other tensors are not supported; send their parts");
  }
}

/// The same values without pending operations: lazy conjugation, negation and zeros.
at::Tensor resolved(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  if (!tensor.is_conj() && !tensor.is_neg()) return tensor;
  c10::NoGradGuard no_grad;
  if (tensor.scalar_type() != at::kComplexHalf) return tensor.resolve_conj().resolve_neg();
  // LibTorch cannot conjugate complex32: negate the imaginary parts of a copy.
  at::Tensor parts = at::view_as_real(tensor.conj()).clone();
  parts.select(-1, 1).neg_();
  return at::view_as_complex(parts);
}

class Packer {
 public:
  explicit Packer(PackOptions options) : options_(std::move(options)) {}

  PackedTensors pack(std::span<const at::Tensor> tensors) {
    if (tensors.empty()) return {};
    Bytes room;
    room.reserve(sizeof(std::uint32_t) + tensors.size() * 64);
    metadata_ = ByteWriter(std::move(room));
    metadata_.put(static_cast<std::uint32_t>(tensors.size()));
    segments_.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      try {
        put(tensors[i]);
      } catch (const Error& error) {
        throw Error(error.kind(), fmt::format("tensor {} of {}: {}", i, tensors.size(), error.message()));
      } catch (const c10::Error& error) {
        throw_unsupported(fmt::format("tensor {} of {} cannot be sent: {}", i, tensors.size(),
                                      error.what_without_backtrace()));
      }
    }
    return {metadata_.take(), std::move(segments_), std::move(shared_), std::move(copies_)};
  }

 private:
  void put(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      metadata_.put(TensorKind::kUndefined);
      return;
    }
    check_sendable(tensor);
    if (tensor.is_cpu()) {
      put_on_cpu(tensor, tensor, false);
    } else {
      c10::NoGradGuard no_grad;
      put_on_cpu(tensor, is_copied_late(tensor) ? tensor : tensor.cpu(), true);
    }
  }

  bool is_copied_late(const at::Tensor& tensor) const {
    return options_.copies != nullptr && device::has_streams(tensor.device()) && !tensor.is_quantized();
  }

  /// `original` says what the tensor is, `local` holds its data on the CPU, or is copied late.
  void put_on_cpu(const at::Tensor& original, const at::Tensor& local, bool keep) {
    if (local.is_sparse()) return put_sparse(original, local, keep);
    if (local.is_quantized()) return put_quantized(original, local, keep);
    metadata_.put(TensorKind::kStrided);
    put_flags(original, 0);
    if (!put_shared(local)) put_strided(local, keep);
  }

  /// The segment of a shared tensor is not sent: the receiver has its memory.
  bool put_shared(const at::Tensor& tensor) {
    if (!options_.share || !is_copied_late(tensor) || tensor.nbytes() == 0) return false;
    const at::Tensor shared = options_.share(resolved(tensor), copies_);
    if (!shared.defined()) return false;
    shared_.push_back(segments_.size() + shared_.size());
    put_block(metadata_, segments_, shared, true);
    segments_.pop_back();
    return true;
  }

  void put_flags(const at::Tensor& tensor, std::uint8_t more) {
    const c10::Device device = options_.place ? options_.place(tensor.device()) : tensor.device();
    const std::uint8_t elsewhere = kDeviceFollows | (options_.place ? kPlaced : 0);
    metadata_.put(static_cast<std::uint8_t>(more | (tensor.requires_grad() ? kRequiresGrad : 0) |
                                            (device.is_cpu() ? 0 : elsewhere)));
    if (!device.is_cpu()) metadata_.put_string(device.str());
  }

  void put_strided(const at::Tensor& tensor, bool keep) {
    at::Tensor plain = resolved(tensor);
    if (is_copied_late(tensor)) plain = options_.copies->to_host(plain, copies_);
    put_block(metadata_, segments_, plain, keep || !plain.is_same(tensor));
  }

  void put_sparse(const at::Tensor& original, const at::Tensor& local, bool keep) {
    check_shape(local.sizes(), local.element_size());
    metadata_.put(TensorKind::kSparseCoo);
    put_flags(original, local.is_coalesced() ? kCoalesced : 0);
    metadata_.put(static_cast<std::uint8_t>(local.sparse_dim()));
    metadata_.put(static_cast<std::uint8_t>(local.dense_dim()));
    for (const std::int64_t size : local.sizes()) metadata_.put(size);
    const at::Tensor indices = local._indices();
    // What repeats elements would need more memory at the receiver than the message has.
    const bool repeats = indices.numel() > 0 && !indices.is_non_overlapping_and_dense();
    put_strided(repeats ? indices.contiguous() : indices, keep || repeats);
    put_strided(local._values(), keep);
  }

  void put_quantized(const at::Tensor& original, const at::Tensor& local, bool keep) {
    metadata_.put(TensorKind::kQuantized);
    put_flags(original, 0);
    const at::QScheme scheme = local.qscheme();
    if (scheme == at::kPerTensorAffine) {
      metadata_.put(Scheme::kPerTensor);
      metadata_.put(local.q_scale());
      metadata_.put(local.q_zero_point());
    } else if (scheme == at::kPerChannelAffine || scheme == at::kPerChannelAffineFloatQParams) {
      metadata_.put(Scheme::kPerChannel);
      metadata_.put(local.q_per_channel_axis());
      // Some schemes compute these on demand: keep them alive.
      put_block(metadata_, segments_, local.q_per_channel_scales().contiguous(), true);
      put_block(metadata_, segments_, local.q_per_channel_zero_points().contiguous(), true);
    } else {
      throw_unsupported(fmt::format("quantization scheme {} is not supported", at::toString(scheme)));
    }
    put_block(metadata_, segments_, local, keep);
  }

  PackOptions options_;
  ByteWriter metadata_;
  std::vector<Segment> segments_;
  std::vector<std::size_t> shared_;
  device::PendingCopies copies_;
};

/// Throws if LibTorch would need more memory than the message has for a tensor's elements, one after the other.
void refuse_repeated(const at::Tensor& part, const char* what) {
  if (part.numel() == 0 || part.is_non_overlapping_and_dense()) return;
  throw_invalid("{} repeat elements, or have gaps between them", what);
}

/// Throws unless the indices are within the sizes and ascend if the tensor is marked coalesced.
void check_indices(const at::Tensor& indices, at::IntArrayRef sizes, bool coalesced) {
  const at::Tensor rows = indices.contiguous();
  const std::int64_t dimensions = rows.size(0), count = rows.size(1);
  const auto* data = rows.data_ptr<std::int64_t>();
  for (std::int64_t d = 0; d < dimensions; ++d) {
    const auto row = std::span(data + d * count, static_cast<std::size_t>(count));
    const bool inside = std::ranges::all_of(row, [&](std::int64_t i) { return i >= 0 && i < sizes[d]; });
    if (!inside) throw_invalid("a sparse tensor has an index outside dimension {} of {}", d, sizes[d]);
  }
  const auto ascends = [&](std::int64_t i) {
    for (std::int64_t d = 0; d < dimensions; ++d) {
      const std::int64_t before = data[d * count + i - 1], now = data[d * count + i];
      if (before != now) return before < now;
    }
    return false;
  };
  for (std::int64_t i = 1; coalesced && i < count; ++i) {
    if (!ascends(i)) throw_invalid("a sparse tensor is marked coalesced, but its indices do not ascend");
  }
}

class Unpacker {
 public:
  Unpacker(BytesView metadata, std::span<Buffer> segments, const UnpackOptions& options)
      : metadata_(metadata), buffers_(segments, options.on_device), options_(options) {}

  std::vector<at::Tensor> unpack() {
    std::vector<at::Tensor> tensors;
    if (!metadata_.at_end()) {
      const std::size_t count = metadata_.get_count(1);
      if (count == 0) throw_invalid("a tensor table without tensors has no bytes");
      tensors.reserve(count);
      for (std::size_t i = 0; i < count; ++i) tensors.push_back(get());
    }
    metadata_.expect_end();
    buffers_.expect_end();
    return tensors;
  }

 private:
  struct Flags {
    bool requires_grad;
    bool coalesced;
    bool placed;
    c10::Device device = c10::kCPU;
  };

  at::Tensor get() {
    const auto kind = metadata_.get<TensorKind>();
    switch (kind) {
      case TensorKind::kUndefined:
        return {};
      case TensorKind::kStrided: {
        const Flags flags = get_flags(0);
        return get_tensor(flags);
      }
      case TensorKind::kSparseCoo:
        return get_sparse();
      case TensorKind::kQuantized:
        return get_quantized();
    }
    throw_invalid("a received tensor has the unknown kind {}", static_cast<unsigned>(kind));
  }

  Flags get_flags(std::uint8_t more) {
    const auto bits = metadata_.get<std::uint8_t>();
    const bool placed_nowhere = (bits & kPlaced) != 0 && (bits & kDeviceFollows) == 0;
    if ((bits & ~(kRequiresGrad | kDeviceFollows | kPlaced | more)) != 0 || placed_nowhere) {
      throw_invalid("a received tensor has the unknown flags {:#x}", bits);
    }
    Flags flags{(bits & kRequiresGrad) != 0, (bits & kCoalesced) != 0, (bits & kPlaced) != 0};
    if ((bits & kDeviceFollows) != 0) flags.device = device::parse(metadata_.get_string());
    return flags;
  }

  /// A part of a tensor, for which the host checks whether it is valid.
  at::Tensor get_strided() {
    const BlockShape shape = get_unquantized();
    return adopt_block(shape, buffers_);
  }

  /// A whole tensor, which may be in device memory.
  at::Tensor get_tensor(const Flags& flags) {
    const BlockShape shape = get_unquantized();
    const DeviceSegment* shared = shape.bytes() == 0 ? nullptr : buffers_.next_on_device();
    if (shared == nullptr) return placed(adopt_block(shape, buffers_), flags);
    if (options_.copies == nullptr) throw_invalid("a tensor was received in device memory");
    using Memory = DeviceSegment::Memory;
    const bool stays =
        shared->memory == Memory::kTensor ||
        (shared->memory == Memory::kReceived && device_of(flags, shared->device) == shared->device);
    if (!stays) return placed(view_device_block(shape, buffers_), flags);
    at::Tensor tensor = take_device_tensor(shape, buffers_);
    device::keep_memory_for(tensor, device::current_stream(tensor.device()));
    return as_leaf(std::move(tensor), flags);
  }

  BlockShape get_unquantized() {
    BlockShape shape = get_block(metadata_);
    if (c10::isQIntType(shape.dtype)) throw_invalid("a received quantized tensor has no quantizer");
    return shape;
  }

  at::Tensor get_sparse() {
    const Flags flags = get_flags(kCoalesced);
    const std::int64_t sparse_dim = metadata_.get<std::uint8_t>();
    const std::int64_t dense_dim = metadata_.get<std::uint8_t>();
    at::DimVector sizes;
    for (std::int64_t i = 0; i < sparse_dim + dense_dim; ++i) sizes.push_back(metadata_.get<std::int64_t>());
    const at::Tensor indices = get_strided();
    refuse_repeated(indices, "the indices of a sparse tensor");
    const at::Tensor values = get_strided();
    check_sparse_shape(sizes, sparse_dim, indices, values);
    check_indices(indices, sizes, flags.coalesced);
    c10::NoGradGuard no_grad;
    at::Tensor tensor = at::_sparse_coo_tensor_unsafe(indices, values, sizes);
    tensor._coalesced_(flags.coalesced);
    return placed(std::move(tensor), flags);
  }

  static void check_sparse_shape(const at::DimVector& sizes, std::int64_t sparse_dim,
                                 const at::Tensor& indices, const at::Tensor& values) {
    const bool possible = std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0; });
    if (!possible) throw_invalid("a received sparse tensor has a negative size");
    check_shape(sizes, values.element_size());
    if (indices.scalar_type() != at::kLong || indices.dim() != 2 || indices.size(0) != sparse_dim ||
        values.dim() != static_cast<std::int64_t>(sizes.size()) - sparse_dim + 1 ||
        values.size(0) != indices.size(1) ||
        !std::equal(sizes.begin() + sparse_dim, sizes.end(), values.sizes().begin() + 1)) {
      throw_invalid("a received sparse tensor of sizes [{}] has indices [{}] and values [{}]",
                    fmt::join(sizes, ", "), fmt::join(indices.sizes(), ", "),
                    fmt::join(values.sizes(), ", "));
    }
  }

  at::Tensor get_quantized() {
    const Flags flags = get_flags(0);
    const auto scheme = metadata_.get<Scheme>();
    if (scheme == Scheme::kPerTensor) {
      const auto scale = metadata_.get<double>();
      const auto zero_point = metadata_.get<std::int64_t>();
      const BlockShape shape = get_quantized_block();
      return placed(
          adopt_block(shape, buffers_, at::make_per_tensor_affine_quantizer(scale, zero_point, shape.dtype)),
          flags);
    }
    if (scheme != Scheme::kPerChannel) {
      throw_invalid("a received tensor has the unknown quantization {}", static_cast<unsigned>(scheme));
    }
    const auto axis = metadata_.get<std::int64_t>();
    const at::Tensor scales = get_strided(), zero_points = get_strided();
    refuse_repeated(scales, "the scales of a quantizer");
    refuse_repeated(zero_points, "the zero points of a quantizer");
    const BlockShape shape = get_quantized_block();
    check_channels(shape, axis, scales, zero_points);
    return placed(adopt_block(shape, buffers_,
                              at::make_per_channel_affine_quantizer(scales, zero_points, axis, shape.dtype)),
                  flags);
  }

  BlockShape get_quantized_block() {
    BlockShape shape = get_block(metadata_);
    if (!c10::isQIntType(shape.dtype))
      throw_invalid("a received tensor has a quantizer but is not quantized");
    return shape;
  }

  static void check_channels(const BlockShape& shape, std::int64_t axis, const at::Tensor& scales,
                             const at::Tensor& zero_points) {
    const auto dimensions = static_cast<std::int64_t>(shape.sizes.size());
    if (axis < 0 || axis >= dimensions) throw_invalid("a quantizer has the channel axis {}", axis);
    const auto fits = [&](const at::Tensor& parameter) {
      return parameter.dim() == 1 && parameter.numel() == shape.sizes[axis];
    };
    const bool whole = scales.scalar_type() == at::kDouble && zero_points.scalar_type() == at::kLong;
    const bool real = scales.scalar_type() == at::kFloat && zero_points.scalar_type() == at::kFloat;
    if (!fits(scales) || !fits(zero_points) || !(whole || real)) {
      throw_invalid("a quantizer's scales and zero points do not fit its tensor's channels");
    }
  }

  /// The tensor's device in this process. `received`: where it is now.
  c10::Device device_of(const Flags& flags, c10::Device received) const {
    if (!flags.placed) return options_.place ? options_.place(flags.device) : received;
    const std::string why = device::why_absent(flags.device);
    if (!why.empty()) throw_invalid("a tensor was sent to device '{}', but {}", flags.device.str(), why);
    return flags.device;
  }

  /// Moves the tensor to its device.
  at::Tensor placed(at::Tensor tensor, const Flags& flags) const {
    const c10::Device here = device_of(flags, tensor.device());
    if (!here.is_cpu() || !tensor.is_cpu()) tensor = moved(tensor, here);
    return as_leaf(std::move(tensor), flags);
  }

  /// Marks the tensor as a leaf if it requires grad.
  static at::Tensor as_leaf(at::Tensor tensor, const Flags& flags) {
    if (flags.requires_grad) {
      if (!c10::isFloatingType(tensor.scalar_type()) && !c10::isComplexType(tensor.scalar_type())) {
        throw_invalid("a received tensor of dtype {} is marked as requiring grad",
                      c10::toString(tensor.scalar_type()));
      }
      tensor.set_requires_grad(true);
    }
    return tensor;
  }

  at::Tensor moved(const at::Tensor& tensor, c10::Device device) const {
    if (!tensor.is_cpu()) return options_.copies->from_shared(tensor, device);
    const bool beside = options_.copies != nullptr && device::has_streams(device);
    return beside ? options_.copies->to_device(tensor, device) : tensor.to(device);
  }

  ByteReader metadata_;
  BufferQueue buffers_;
  const UnpackOptions& options_;
};

}  // namespace

void PackedTensors::own_memory() {
  for (Segment& segment : segments) {
    if (segment.keep) continue;
    const Buffer copy = allocate_buffer(segment.size);
    std::memcpy(copy.data, segment.data, segment.size);
    segment.data = copy.data;
    segment.keep = copy.owner;
  }
}

PackedTensors pack(std::span<const at::Tensor> tensors, PackOptions options) {
  return Packer(std::move(options)).pack(tensors);
}

std::vector<at::Tensor> unpack(BytesView metadata, std::span<Buffer> segments, const UnpackOptions& options) {
  try {
    return Unpacker(metadata, segments, options).unpack();
  } catch (const c10::Error& error) {
    throw_invalid("LibTorch refused a received tensor: {}", error.what_without_backtrace());
  }
}

}  // namespace torchspan::wire
