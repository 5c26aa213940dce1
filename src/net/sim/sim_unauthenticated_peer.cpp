#include "net/sim/sim_unauthenticated_peer.h"

#include <algorithm>

namespace torchspan::net {

SimUnauthenticatedPeer::SimUnauthenticatedPeer(const SimNetwork& network, const std::string& name)
    : network_(SimNetwork::Impl::of(network)), node_(std::make_shared<SimNode>(name, nullptr)) {}

SimUnauthenticatedPeer::~SimUnauthenticatedPeer() {
  if (channel_) channel_->end(Error(ErrorKind::kDisconnected, "the unauthenticated peer left"));
  std::deque<Arrival> inbox;
  MutexLock lock(network_->mutex);
  inbox.swap(node_->inbox);
  node_->alive = false;
}

void SimUnauthenticatedPeer::dial(const std::string& address, BytesView bytes) {
  const std::string target = address.substr(address.find(':') + 1);
  MutexLock lock(network_->mutex);
  channel_ =
      std::make_shared<SimChannel>(SimChannel::Start{.network = network_,
                                                     .node = node_,
                                                     .outward = network_->make_wire(node_->name, target),
                                                     .inward = network_->make_wire(target, node_->name),
                                                     .id = network_->next_id(),
                                                     .deadline = Deadline::never(),
                                                     .dialed = true},
                                   TransportOptions{});
  channel_->outward()->source = channel_;
  channel_->inward()->target = channel_;
  network_->transmit(
      channel_->outward(),
      {.kind = Packet::Kind::kDial, .header = Bytes(bytes.begin(), bytes.end()), .segments = {}});
}

void SimUnauthenticatedPeer::send(BytesView bytes) {
  MutexLock lock(network_->mutex);
  network_->transmit(
      channel_->outward(),
      {.kind = Packet::Kind::kHandshake, .header = Bytes(bytes.begin(), bytes.end()), .segments = {}});
}

bool SimUnauthenticatedPeer::hung_up() const {
  MutexLock lock(network_->mutex);
  return std::ranges::any_of(node_->inbox, [](const Arrival& arrival) {
    return arrival.packet.kind == Packet::Kind::kEnd || arrival.packet.kind == Packet::Kind::kNoListener;
  });
}

}  // namespace torchspan::net
