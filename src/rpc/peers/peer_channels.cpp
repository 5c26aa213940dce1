#include "rpc/peers/peer_channels.h"

#include <utility>

namespace torchspan::rpc {
namespace {

constexpr Duration kDialLimit = std::chrono::seconds(5);

}  // namespace

PeerChannels::PeerChannels(net::Transport& transport, Executor& executor, PeerTable& peers, Peer self)
    : transport_(transport), executor_(executor), peers_(peers), self_(std::move(self)) {}

Bytes PeerChannels::hello_frame(const Protocol& protocol) const {
  wire::Payload payload = wire::to_payload(Hello{self_.info.name, self_.info.rank, self_.instance});
  wire::Frame frame;
  frame.header.version = protocol.version;
  frame.header.type = Hello::kType;
  frame.header.flags = wire::kFlagOneWay;
  frame.header.instance = self_.instance;
  frame.value = std::move(payload.value);
  return wire::encode_frame(frame);
}

PeerChannels::Link PeerChannels::to(std::uint32_t rank) {
  MutexLock lock(mutex_);
  // Inside the lock: a peer that departs after this has its channels closed after this.
  const Peer peer = peers_.present(rank);
  if (const auto found = current_.find(rank); found != current_.end() && found->second.peer == peer.id())
    return found->second;
  const Protocol protocol = peers_.protocol(rank);
  Link link{transport_.connect(peer.address, executor_.deadline_in(kDialLimit)), peer.id()};
  link.channel->send(hello_frame(protocol), {});
  known_[link.channel.get()] = {peer.id(), ++counter_, link.channel};
  return current_[rank] = std::move(link);
}

std::optional<PeerId> PeerChannels::peer_of(const net::Channel* channel) const {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  return it == known_.end() ? std::nullopt : std::optional(it->second.peer);
}

bool PeerChannels::greet(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  MutexLock lock(mutex_);
  const std::optional<Peer> peer = peers_.find_present(hello.rank);
  if (!peer || hello.rank == self_.info.rank) return false;
  if (peer->info.name != hello.name || peer->instance != hello.instance) return false;
  known_[channel.get()] = {peer->id(), ++counter_, channel};
  Link& current = current_[hello.rank];
  if (!current.channel || current.peer != peer->id()) current = {channel, peer->id()};
  return true;
}

bool PeerChannels::is_shut(const net::Channel* channel) const {
  MutexLock lock(mutex_);
  return shut_.contains(channel);
}

void PeerChannels::no_longer_current(const net::Channel* channel, std::uint32_t rank) {
  const auto found = current_.find(rank);
  if (found != current_.end() && found->second.channel.get() == channel) current_.erase(found);
}

void PeerChannels::drop(const net::Channel* channel) {
  MutexLock lock(mutex_);
  const auto it = known_.find(channel);
  if (it != known_.end()) no_longer_current(channel, it->second.peer.rank);
}

std::optional<std::uint32_t> PeerChannels::closed(const net::Channel* channel) {
  std::shared_ptr<net::Channel> shut;  // destroyed outside the lock
  MutexLock lock(mutex_);
  if (const auto found = shut_.find(channel); found != shut_.end()) {
    shut = std::move(found->second);
    shut_.erase(found);
  }
  auto it = known_.find(channel);
  if (it == known_.end()) return std::nullopt;
  const std::uint32_t rank = it->second.peer.rank;
  no_longer_current(channel, rank);
  known_.erase(it);
  return rank;
}

void PeerChannels::close_channels_of(std::optional<std::uint32_t> rank) {
  std::map<std::uint64_t, std::shared_ptr<net::Channel>> channels;  // in the order in which they became known
  {
    MutexLock lock(mutex_);
    for (const auto& [key, known] : known_) {
      if (!rank || known.peer.rank == *rank) channels[known.number] = known.channel;
    }
    for (const auto& [number, channel] : channels) {
      no_longer_current(channel.get(), known_.at(channel.get()).peer.rank);
      known_.erase(channel.get());
      shut_[channel.get()] = channel;
    }
  }
  for (const auto& [number, channel] : channels) channel->close();
}

}  // namespace torchspan::rpc
