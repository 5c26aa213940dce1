#include "rpc/device_memory/outgoing_memory.h"

#include <algorithm>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "rendezvous/api/process_stat.h"

namespace torchspan::rpc {
namespace {

bool has_ended(const ProcessId& process) {
  const auto stat = rendezvous::read_process_stat(process.pid);
  return !stat || stat->start_ticks != process.start_ticks || stat->state == 'Z' || stat->state == 'X';
}

}  // namespace

OutgoingMemory::Shared OutgoingMemory::share(PeerId to, c10::Device here, c10::Device there,
                                             std::size_t bytes) {
  if (here.type() != runtime_->type()) return {};
  const Key key{to, here.str(), there.str()};
  std::shared_ptr<LentArea> area;
  std::uint32_t number = 0;
  {
    MutexLock lock(mutex_);
    const auto found = numbers_.find(key);
    if (found == numbers_.end()) {
      number = ++last_route_;
      numbers_.emplace(key, number);
      const Route& route = routes_.emplace(number, Route{key, here}).first->second;
      return {.offer = offer_of(number, route)};
    }
    number = found->second;
    const Route& route = routes_.at(number);
    if (route.state == State::kConnection) return {.device_target = number};
    if (route.state != State::kReady) return {};
    area = route.area;
  }
  const std::optional<Lease> lease = area->take(bytes);
  if (!lease) return {};
  return {.tensor = std::make_shared<const LentTensor>(std::move(area), *lease, number)};
}

std::optional<SharedArea> OutgoingMemory::area_to(PeerId to, c10::Device here, c10::Device there) const {
  MutexLock lock(mutex_);
  const auto number = numbers_.find(Key{to, here.str(), there.str()});
  if (number == numbers_.end()) return std::nullopt;
  const Route& route = routes_.at(number->second);
  if (route.state != State::kReady) return std::nullopt;
  return SharedArea{route.area, number->second};
}

OfferDeviceMemory OutgoingMemory::offer_of(std::uint32_t number, const Route& route) const {
  OfferDeviceMemory offer;
  offer.route = number;
  offer.from = route.key.here;
  offer.to = route.key.there;
  offer.bytes = bytes_;
  return offer;
}

OutgoingMemory::Route* OutgoingMemory::find(PeerId peer, std::uint32_t number) {
  const auto found = routes_.find(number);
  return found == routes_.end() || found->second.key.to != peer ? nullptr : &found->second;
}

std::optional<OfferDeviceMemory> OutgoingMemory::answered(PeerId by, std::uint32_t number,
                                                          const OfferAnswer& answer, std::string& failure) {
  OfferDeviceMemory offer;
  c10::Device here = c10::kCPU;
  {
    MutexLock lock(mutex_);
    Route* route = find(by, number);
    if (route == nullptr) return std::nullopt;  // the peer has departed
    if (answer.outcome != OfferOutcome::kAccepted) {
      route->state = State::kRefused;
      route->area.reset();
      if (answer.outcome == OfferOutcome::kFailed) failure = answer.reason;
      return std::nullopt;
    }
    if (route->state != State::kAsking) {
      if (route->state == State::kOffering && route->area) route->state = State::kReady;
      return std::nullopt;
    }
    route->state = State::kOffering;
    offer = offer_of(number, *route);
    here = route->here;
  }
  return allocate(by, number, std::move(offer), here, failure);
}

std::optional<OfferDeviceMemory> OutgoingMemory::allocate(PeerId by, std::uint32_t number,
                                                          OfferDeviceMemory offer, c10::Device here,
                                                          std::string& failure) {
  std::shared_ptr<LentArea> area;
  State refused = State::kRefused;
  try {
    const std::shared_ptr<std::byte> memory = runtime_->allocate(here, bytes_);
    const Bytes handle = runtime_->export_memory(here, memory.get());
    offer.handle.assign(reinterpret_cast<const char*>(handle.data()), handle.size());
    area = std::make_shared<LentArea>(memory, bytes_);
  } catch (...) {
    if (to_error(std::current_exception()).kind() == ErrorKind::kOverloaded) refused = State::kNoMemory;
    failure = torchspan::describe(std::current_exception()).text;
  }
  MutexLock lock(mutex_);
  Route* route = find(by, number);
  if (route == nullptr || route->state != State::kOffering) return std::nullopt;
  if (!area) {
    route->state = refused;
    return std::nullopt;
  }
  route->area = std::move(area);
  return offer;
}

void OutgoingMemory::use_connection(PeerId by, std::uint32_t number) {
  std::shared_ptr<LentArea> area;  // freed without the lock
  MutexLock lock(mutex_);
  Route* route = find(by, number);
  // The question may have gone over another connection than the offer.
  if (route == nullptr || (route->state != State::kAsking && route->state != State::kOffering)) return;
  route->state = State::kConnection;
  area = std::move(route->area);
}

bool OutgoingMemory::lacks_memory(PeerId to, std::uint32_t number) {
  MutexLock lock(mutex_);
  const Route* route = find(to, number);
  return route != nullptr && route->state == State::kNoMemory;
}

void OutgoingMemory::lost(PeerId to, std::uint32_t number) {
  std::shared_ptr<LentArea> area;  // freed without the lock
  MutexLock lock(mutex_);
  Route* route = find(to, number);
  if (route == nullptr) return;
  area = std::move(route->area);
  numbers_.erase(route->key);
  routes_.erase(number);
}

void OutgoingMemory::returned(PeerId by, const ReleaseDeviceMemory& release) {
  std::shared_ptr<LentArea> area;
  {
    MutexLock lock(mutex_);
    if (const Route* route = find(by, release.route)) area = route->area;
  }
  if (!area) {
    throw_invalid("it returned device memory of route {}, which it does not have", release.route);
  }
  for (const std::uint64_t lease : release.leases) area->returned(lease);
}

void OutgoingMemory::departed(PeerId peer, const ProcessId& process) {
  MutexLock lock(mutex_);
  for (auto route = routes_.begin(); route != routes_.end();) {
    if (route->second.key.to != peer) {
      ++route;
      continue;
    }
    if (route->second.area) kept_.push_back({process, std::move(route->second.area)});
    numbers_.erase(route->second.key);
    route = routes_.erase(route);
  }
}

bool OutgoingMemory::free_ended() {
  std::vector<Kept> kept;
  {
    MutexLock lock(mutex_);
    kept.swap(kept_);
  }
  std::erase_if(kept, [](const Kept& one) { return has_ended(one.process); });
  MutexLock lock(mutex_);
  std::move(kept.begin(), kept.end(), std::back_inserter(kept_));
  return !kept_.empty();
}

std::size_t OutgoingMemory::areas() const {
  MutexLock lock(mutex_);
  return kept_.size() +
         static_cast<std::size_t>(std::count_if(
             routes_.begin(), routes_.end(), [](const auto& entry) { return entry.second.area != nullptr; }));
}

}  // namespace torchspan::rpc
