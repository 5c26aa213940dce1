#include "python/rpc/messages.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include <ATen/ATen.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>

namespace torchspan::python {

using torch::distributed::rpc::MessageType;

const char* name_of(MessageType type) {
  switch (type) {
    case MessageType::SCRIPT_CALL:
      return "SCRIPT_CALL";
    case MessageType::PYTHON_CALL:
      return "PYTHON_CALL";
    case MessageType::SCRIPT_REMOTE_CALL:
      return "SCRIPT_REMOTE_CALL";
    case MessageType::PYTHON_REMOTE_CALL:
      return "PYTHON_REMOTE_CALL";
    case MessageType::SCRIPT_RREF_FETCH_CALL:
      return "SCRIPT_RREF_FETCH_CALL";
    case MessageType::PYTHON_RREF_FETCH_CALL:
      return "PYTHON_RREF_FETCH_CALL";
    case MessageType::RREF_USER_DELETE:
      return "RREF_USER_DELETE";
    case MessageType::RREF_FORK_REQUEST:
      return "RREF_FORK_REQUEST";
    case MessageType::RREF_CHILD_ACCEPT:
      return "RREF_CHILD_ACCEPT";
    case MessageType::FORWARD_AUTOGRAD_REQ:
      return "FORWARD_AUTOGRAD_REQ";
    case MessageType::BACKWARD_AUTOGRAD_REQ:
      return "BACKWARD_AUTOGRAD_REQ";
    case MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
      return "CLEANUP_AUTOGRAD_CONTEXT_REQ";
    case MessageType::RUN_WITH_PROFILING_REQ:
      return "RUN_WITH_PROFILING_REQ";
    case MessageType::RREF_BACKWARD_REQ:
      return "RREF_BACKWARD_REQ";
    default:
      return "message";
  }
}

bool is_call(MessageType type) {
  switch (type) {
    case MessageType::RREF_USER_DELETE:
    case MessageType::RREF_FORK_REQUEST:
    case MessageType::RREF_CHILD_ACCEPT:
    case MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
      return false;
    default:
      return true;
  }
}

namespace {

/// Views with gaps keep their strides if the memory that they span is small, or at most this many times their elements.
constexpr std::int64_t kMostSpan = 2;
constexpr std::int64_t kSmallSpan = std::int64_t{8} << 10;

/// How many elements lie between a tensor's first and last one; nullopt if its strides need not be sent.
std::optional<std::int64_t> gapped_span(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu() ||
      tensor.numel() == 0 || tensor.is_quantized() || tensor.is_conj() || tensor.is_neg() ||
      tensor.is_non_overlapping_and_dense()) {
    return std::nullopt;
  }
  std::int64_t span = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) span += (tensor.size(i) - 1) * tensor.stride(i);
  const auto width = static_cast<std::int64_t>(tensor.element_size());
  return span * width <= std::max(kSmallSpan, kMostSpan * tensor.numel() * width) ? std::optional(span)
                                                                                  : std::nullopt;
}

/// Replaces views with gaps by the memory that they span, and writes their sizes and strides.
void flatten_views(std::vector<at::Tensor>& tensors, ByteWriter& bytes) {
  const std::size_t place = bytes.size();
  std::uint32_t count = 0;
  bytes.put(count);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& tensor = tensors[i];
    const auto span = gapped_span(tensor);
    if (!span) continue;
    ++count;
    bytes.put(static_cast<std::uint32_t>(i));
    bytes.put(static_cast<std::uint32_t>(tensor.dim()));
    for (const std::int64_t size : tensor.sizes()) bytes.put(size);
    for (const std::int64_t stride : tensor.strides()) bytes.put(stride);
    const bool requires_grad = tensor.requires_grad();
    tensor = tensor.detach().as_strided({*span}, {1}, tensor.storage_offset());
    if (requires_grad) tensor.set_requires_grad(true);
  }
  bytes.patch(place, count);
}

/// Restores what flatten_views() wrote.
void restore_views(std::vector<at::Tensor>& tensors, ByteReader& bytes) {
  const std::size_t count = bytes.get_count(2 * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < count; ++i) {
    const auto index = bytes.get<std::uint32_t>();
    std::vector<std::int64_t> sizes(bytes.get_count(2 * sizeof(std::int64_t)));
    std::vector<std::int64_t> strides(sizes.size());
    for (std::int64_t& size : sizes) size = bytes.get<std::int64_t>();
    for (std::int64_t& stride : strides) stride = bytes.get<std::int64_t>();
    const auto refuse = [] {
      throw_invalid("a message of torch.distributed.rpc has a view beyond its memory");
    };
    if (index >= tensors.size() || tensors[index].dim() != 1) refuse();
    at::Tensor& tensor = tensors[index];
    std::int64_t left = tensor.numel() - 1;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const std::int64_t steps = sizes[d] - 1, stride = strides[d];
      if (steps < 0 || stride < 0 || (stride != 0 && steps > left / stride)) refuse();
      left -= steps * stride;
    }
    const bool requires_grad = tensor.requires_grad();
    tensor = tensor.detach().as_strided(sizes, strides, tensor.storage_offset());
    if (requires_grad) tensor.set_requires_grad(true);
  }
}

}  // namespace

wire::Payload to_payload(const TorchMessage& message, const std::vector<c10::Device>& devices) {
  wire::Payload payload;
  payload.tensors = message.tensors();
  Bytes room;
  room.reserve(message.payload().size() + 64);
  ByteWriter bytes(std::move(room));
  bytes.put(static_cast<std::uint16_t>(message.type()));
  bytes.put(static_cast<std::uint32_t>(devices.size()));
  for (const c10::Device device : devices) {
    bytes.put(static_cast<std::int8_t>(device.type()));
    bytes.put(static_cast<std::int16_t>(device.index()));
  }
  flatten_views(payload.tensors, bytes);
  bytes.put_bytes(std::as_bytes(std::span(message.payload())));
  payload.value = bytes.take();
  return payload;
}

bool runs_python(const wire::Payload& request) {
  if (request.value.size() < sizeof(std::uint16_t)) return false;
  switch (static_cast<MessageType>(ByteReader(request.value).get<std::uint16_t>())) {
    case MessageType::PYTHON_CALL:
    case MessageType::PYTHON_REMOTE_CALL:
    case MessageType::PYTHON_RREF_FETCH_CALL:
    case MessageType::FORWARD_AUTOGRAD_REQ:
    case MessageType::RUN_WITH_PROFILING_REQ:
      return true;
    default:
      return false;
  }
}

ReceivedTorchMessage from_payload(wire::Payload& payload, std::int64_t id) {
  ByteReader bytes(payload.value);
  const auto type = static_cast<MessageType>(bytes.get<std::uint16_t>());
  const auto count = bytes.get<std::uint32_t>();
  if (count != 0 && count != payload.tensors.size()) {
    throw_invalid("a message of torch.distributed.rpc has another number of tensors than devices");
  }
  ReceivedTorchMessage received;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto kind = static_cast<c10::DeviceType>(bytes.get<std::int8_t>());
    const auto index = bytes.get<std::int16_t>();
    if (!c10::isValidDeviceType(kind) || index < -1 || index > 127)
      throw_invalid("a message of torch.distributed.rpc names an impossible device");
    received.devices.emplace_back(kind, static_cast<c10::DeviceIndex>(index));
  }
  restore_views(payload.tensors, bytes);
  const BytesView rest = bytes.get_bytes(bytes.left());
  const auto* const begin = reinterpret_cast<const char*>(rest.data());
  received.message = c10::make_intrusive<TorchMessage>(std::vector<char>(begin, begin + rest.size()),
                                                       std::move(payload.tensors), type, id);
  return received;
}

}  // namespace torchspan::python
