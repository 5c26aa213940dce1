#include "rpc/device_memory/incoming_memory.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "device/api/devices.h"

namespace torchspan::rpc {

void IncomingMemory::check_new(PeerId from, std::uint32_t route) {
  const auto departed = departed_.find(from.rank);
  if (departed != departed_.end() && from.incarnation <= departed->second)
    throw Error(ErrorKind::kDisconnected, "the worker that offered device memory has departed");
  const auto& routes = mapped_[from];
  if (routes.contains(route)) {
    throw_invalid("route {} was offered twice", route);
  }
  if (routes.size() >= kMostRoutes) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("{} areas of device memory of one worker are mapped already", routes.size()));
  }
}

void IncomingMemory::accept(PeerId from, const OfferDeviceMemory& offer, c10::Device device) {
  const std::string devices = device::parse(offer.from).str() + " " + device::parse(offer.to).str();
  MutexLock lock(mutex_);
  const auto peer = mapped_.find(from);
  if (peer != mapped_.end()) {
    std::erase_if(peer->second, [&](const auto& route) {
      return !route.second.memory && route.second.devices == devices && route.first < offer.route;
    });
  }
  check_new(from, offer.route);
  mapped_[from].emplace(offer.route, Mapped{.device = device, .devices = devices});
}

void IncomingMemory::open(PeerId from, const OfferDeviceMemory& offer, c10::Device device) {
  {
    MutexLock lock(mutex_);
    check_new(from, offer.route);
  }
  if (offer.bytes == 0 || offer.bytes > std::numeric_limits<std::ptrdiff_t>::max()) {
    throw_invalid("an area of {} bytes was offered", offer.bytes);
  }
  const auto bytes = static_cast<std::size_t>(offer.bytes);
  const auto* handle = reinterpret_cast<const std::byte*>(offer.handle.data());
  auto memory = runtime_->open_memory(device, BytesView(handle, offer.handle.size()), bytes);
  Mapped mapped{device, bytes, std::move(memory)};  // unmapped without the lock
  MutexLock lock(mutex_);
  check_new(from, offer.route);  // it may have departed meanwhile
  mapped_[from].emplace(offer.route, std::move(mapped));
}

IncomingMemory::Mapped IncomingMemory::find(PeerId from, std::uint32_t route) const {
  MutexLock lock(mutex_);
  const auto peer = mapped_.find(from);
  if (peer != mapped_.end()) {
    const auto found = peer->second.find(route);
    if (found != peer->second.end()) return found->second;
  }
  throw_invalid("a tensor is in device memory of route {}, which was not offered", route);
}

c10::Device IncomingMemory::device_of(PeerId from, std::uint32_t route) const {
  const Mapped found = find(from, route);
  if (found.memory) {
    throw_invalid("a tensor came over the connection for route {}, which is shared memory", route);
  }
  return found.device;
}

void IncomingMemory::insert(PeerId from, BytesView blob, ReceivedSegments segments) const {
  wire::Payload payload;
  payload.value.assign(blob.begin(), blob.end());
  const auto places = wire::from_payload<SharedPlaces>(payload);
  const SharedPlace* before = nullptr;
  for (const SharedPlace& place : places.all) {
    const Mapped area = find(from, place.route);
    if (place.bytes == 0 || place.offset > area.bytes || place.bytes > area.bytes - place.offset) {
      throw_invalid(
          "a tensor of {} bytes at {} is outside of the {} bytes of device memory that were offered as route "
          "{}",
          place.bytes, place.offset, area.bytes, place.route);
    }
    const bool ascends = before == nullptr || place.segment > before->segment;
    if (!ascends || place.segment > segments.all.size()) {
      throw_invalid("a tensor in device memory is segment {} of a message with {} others", place.segment,
                    segments.all.size());
    }
    Buffer buffer;
    buffer.data = area.memory.get() + place.offset;
    buffer.size = static_cast<std::size_t>(place.bytes);
    buffer.owner =
        std::shared_ptr<void>(buffer.data, [memory = area.memory, from, place, give_back = give_back_](
                                               void*) { give_back(from, place.route, place.lease); });
    segments.insert(place.segment, std::move(buffer), area.device, wire::DeviceSegment::Memory::kShared);
    before = &place;
  }
}

void IncomingMemory::departed(PeerId peer) {
  std::map<std::uint32_t, Mapped> gone;  // unmapped without the lock
  MutexLock lock(mutex_);
  std::uint32_t& last = departed_.try_emplace(peer.rank, peer.incarnation).first->second;
  last = std::max(last, peer.incarnation);
  const auto found = mapped_.find(peer);
  if (found == mapped_.end()) return;
  gone.swap(found->second);
  mapped_.erase(found);
}

}  // namespace torchspan::rpc
