#include "rpc/tensor_parts/incoming_parts.h"

#include <cstring>
#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::rpc {
namespace {

[[noreturn]] void refuse_part(std::string text) { throw Error(ErrorKind::kInvalid, std::move(text)); }

}  // namespace

void IncomingParts::receive(const net::Channel* channel, const TensorPart& part,
                            const std::vector<Buffer>& segments) {
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
  Partial& partial = begin(tensors, part);
  if (part.bytes != partial.memory.size || arrived.size > partial.memory.size - partial.received) {
    refuse_part(fmt::format(
        "a part of {} bytes of tensor {} says that the tensor has {} bytes, of {} bytes of which {} had "
        "arrived",
        arrived.size, part.tensor, part.bytes, partial.memory.size, partial.received));
  }
  std::memcpy(partial.memory.data + partial.received, arrived.data, arrived.size);
  partial.received += arrived.size;
}

/// The memory of a new tensor is reserved as a whole; the system gives it pages as parts arrive.
IncomingParts::Partial& IncomingParts::begin(Tensors& tensors, const TensorPart& part) {
  const auto found = tensors.find(part.tensor);
  if (found != tensors.end()) return found->second;
  if (tensors.size() >= kMostTensors) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("parts of more than {} tensors arrived before their messages", kMostTensors));
  }
  Partial fresh{allocate_buffer(part.bytes), 0};
  return tensors.emplace(part.tensor, std::move(fresh)).first->second;
}

Buffer IncomingParts::take(Tensors& tensors, std::uint64_t number) {
  const auto found = tensors.find(number);
  if (found == tensors.end())
    refuse_part(fmt::format("a message has tensor {} in parts, and none had arrived", number));
  Partial& partial = found->second;
  if (partial.received != partial.memory.size) {
    refuse_part(fmt::format("a message has tensor {} in parts, and {} of its {} bytes had arrived", number,
                            partial.received, partial.memory.size));
  }
  Buffer memory = std::move(partial.memory);
  tensors.erase(found);
  return memory;
}

void IncomingParts::insert(const net::Channel* channel, BytesView blob, std::vector<Buffer>& segments,
                           std::vector<wire::DeviceSegment>& on_device) {
  wire::Payload payload;
  payload.value.assign(blob.begin(), blob.end());
  const auto places = wire::from_payload<SplitPlaces>(payload);
  Tensors& tensors = channels_[channel];
  const SplitPlace* before = nullptr;
  for (const SplitPlace& place : places.all) {
    const bool ascends = before == nullptr || place.segment > before->segment;
    if (!ascends || place.segment > segments.size()) {
      refuse_part(fmt::format("a tensor in parts is segment {} of a message with {} others", place.segment,
                              segments.size()));
    }
    segments.insert(segments.begin() + place.segment, take(tensors, place.tensor));
    for (wire::DeviceSegment& other : on_device) {
      if (other.index >= place.segment) ++other.index;
    }
    before = &place;
  }
}

std::size_t IncomingParts::waiting() const {
  std::size_t count = 0;
  for (const auto& [channel, tensors] : channels_) count += tensors.size();
  return count;
}

}  // namespace torchspan::rpc
