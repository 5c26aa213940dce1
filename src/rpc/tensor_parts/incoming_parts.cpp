#include "rpc/tensor_parts/incoming_parts.h"

#include <cstring>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>

#include "device/api/tensors.h"

namespace torchspan::rpc {
namespace {

[[noreturn]] void refuse_part(std::string text) { throw_invalid(std::move(text)); }

}  // namespace

void IncomingParts::receive(const net::Channel* channel, const TensorPart& part,
                            const std::vector<Buffer>& segments, std::optional<c10::Device> device) {
  Tensors& tensors = channels_[channel];
  if (segments.empty()) {
    if (tensors.erase(part.tensor) == 0)
      refuse_part(fmt::format("the end of tensor {} arrived, of which no part had arrived", part.tensor));
    return;
  }
  if (segments.size() > 1 || segments.front().size == 0)
    refuse_part(fmt::format("a part of tensor {} has {} segments, the first of {} bytes", part.tensor,
                            segments.size(), segments.front().size));
  const Buffer& arrived = segments.front();
  Partial& partial = begin(tensors, part, device);
  if (part.bytes != partial.memory.size || arrived.size > partial.memory.size - partial.received) {
    refuse_part(fmt::format(
        "a part of {} bytes of tensor {} says that the tensor has {} bytes, of {} bytes of which {} had "
        "arrived",
        arrived.size, part.tensor, part.bytes, partial.memory.size, partial.received));
  }
  if (device) move_to(*device, partial);
  copy(arrived, device.value_or(c10::Device(c10::kCPU)), partial);
  partial.received += arrived.size;
}

IncomingParts::Partial& IncomingParts::begin(Tensors& tensors, const TensorPart& part,
                                             std::optional<c10::Device> device) {
  const auto found = tensors.find(part.tensor);
  if (found != tensors.end()) return found->second;
  if (tensors.size() >= kMostTensors) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("parts of more than {} tensors arrived before their messages", kMostTensors));
  }
  return tensors.emplace(part.tensor, allocate(part.bytes, device)).first->second;
}

/// Host memory is reserved as a whole; the system gives it pages as parts arrive. If the device still has no room for the
/// tensor when its message comes, the message fails, not its connection.
IncomingParts::Partial IncomingParts::allocate(std::uint64_t bytes, std::optional<c10::Device> device) {
  if (device) {
    if (auto memory = received_.allocate(*device, bytes)) return {std::move(*memory), *device};
  }
  Partial partial{allocate_buffer(bytes)};
  partial.stays = device.has_value();
  return partial;
}

/// Parts came through host memory before.
void IncomingParts::move_to(c10::Device device, Partial& partial) {
  if (!partial.device.is_cpu() || partial.stays) return;
  std::optional<Buffer> memory = received_.allocate(device, partial.memory.size);
  partial.stays = !memory;
  if (!memory) return;
  const Partial moved{std::move(*memory), device};
  copy({partial.memory.data, partial.received, nullptr}, c10::kCPU, moved);
  partial.memory = moved.memory;
  partial.device = device;
}

/// Copies to where the next part belongs.
void IncomingParts::copy(const Buffer& from, c10::Device device, const Partial& to) {
  std::byte* const place = to.memory.data + to.received;
  if (device.is_cpu() && to.device.is_cpu()) {
    std::memcpy(place, from.data, from.size);
    return;
  }
  const auto bytes = static_cast<std::int64_t>(from.size);
  copies_.copy_and_wait(device::view_memory(from.data, {bytes}, {1}, at::kByte, device),
                        device::view_memory(place, {bytes}, {1}, at::kByte, to.device));
}

IncomingParts::Partial IncomingParts::take(Tensors& tensors, std::uint64_t number) {
  const auto found = tensors.find(number);
  if (found == tensors.end())
    refuse_part(fmt::format("a message has tensor {} in parts, and none had arrived", number));
  Partial& partial = found->second;
  if (partial.received != partial.memory.size) {
    refuse_part(fmt::format("a message has tensor {} in parts, and {} of its {} bytes had arrived", number,
                            partial.received, partial.memory.size));
  }
  Partial whole = std::move(partial);
  tensors.erase(found);
  return whole;
}

void IncomingParts::insert(const net::Channel* channel, BytesView blob, ReceivedSegments segments) {
  wire::Payload payload;
  payload.value.assign(blob.begin(), blob.end());
  const auto places = wire::from_payload<SplitPlaces>(payload);
  Tensors& tensors = channels_[channel];
  const SplitPlace* before = nullptr;
  for (const SplitPlace& place : places.all) {
    const bool ascends = before == nullptr || place.segment > before->segment;
    if (!ascends || place.segment > segments.all.size()) {
      refuse_part(fmt::format("a tensor in parts is segment {} of a message with {} others", place.segment,
                              segments.all.size()));
    }
    Partial whole = take(tensors, place.tensor);
    std::optional<c10::Device> device;
    if (!whole.device.is_cpu()) device = whole.device;
    segments.insert(place.segment, std::move(whole.memory), device, wire::DeviceSegment::Memory::kReceived);
    before = &place;
  }
}

std::size_t IncomingParts::waiting() const {
  std::size_t count = 0;
  for (const auto& [channel, tensors] : channels_) count += tensors.size();
  return count;
}

}  // namespace torchspan::rpc
