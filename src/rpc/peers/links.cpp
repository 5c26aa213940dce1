#include "rpc/peers/links.h"

#include <fmt/format.h>

namespace torchspan::rpc {
namespace {
constexpr Duration kDialLimit = std::chrono::seconds(5);
}

Links::Links(net::Transport& transport, Executor& executor, LinkMember self)
    : transport_(transport), executor_(executor), self_(std::move(self)) {}

Bytes Links::hello_frame() const {
  wire::Payload payload = wire::to_payload(Hello{self_.info.name, self_.info.rank, self_.instance});
  wire::Frame frame;
  frame.header.type = Hello::kType;
  frame.header.flags = wire::kFlagOneWay;
  frame.header.instance = self_.instance;
  frame.value = std::move(payload.value);
  return wire::encode_frame(frame);
}

void Links::add(LinkMember member) {
  const std::uint32_t rank = member.info.rank;
  close_channels_of(rank);
  MutexLock lock(mutex_);
  peers_[rank] = Peer{std::move(member), nullptr, std::nullopt};
}

bool Links::knows(const LinkMember& member) const {
  MutexLock lock(mutex_);
  auto found = peers_.find(member.info.rank);
  return found != peers_.end() && found->second.member.instance == member.instance;
}

Links::Link Links::to(std::uint32_t rank) {
  MutexLock lock(mutex_);
  auto found = peers_.find(rank);
  if (found == peers_.end()) {
    throw Error(ErrorKind::kInvalid, fmt::format("there is no rank {} in this world", rank));
  }
  Peer& peer = found->second;
  if (peer.departed) throw *peer.departed;
  if (!peer.channel) {
    auto channel = transport_.connect(peer.member.address, executor_.deadline_in(kDialLimit));
    channel->send(hello_frame(), {});
    known_[channel.get()] = {peer.member.id(), ++counter_, channel};
    peer.channel = std::move(channel);
  }
  return {peer.channel, peer.member.id()};
}

std::optional<PeerId> Links::peer_of(const net::Channel* channel) const {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  return it == known_.end() ? std::nullopt : std::optional(it->second.peer);
}

bool Links::greet(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  MutexLock lock(mutex_);
  auto found = peers_.find(hello.rank);
  if (found == peers_.end() || found->second.departed || hello.rank == self_.info.rank) return false;
  Peer& peer = found->second;
  if (peer.member.info.name != hello.name || peer.member.instance != hello.instance) return false;
  known_[channel.get()] = {peer.member.id(), ++counter_, channel};
  if (!peer.channel) peer.channel = channel;
  return true;
}

bool Links::is_shut(const net::Channel* channel) const {
  MutexLock lock(mutex_);
  return shut_.contains(channel);
}

void Links::drop(const net::Channel* channel) {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  if (it == known_.end()) return;
  Peer& peer = peers_[it->second.peer.rank];
  if (peer.channel.get() == channel) peer.channel = nullptr;
}

std::optional<std::uint32_t> Links::closed(const net::Channel* channel) {
  std::shared_ptr<net::Channel> shut;  // ends outside the lock
  MutexLock lock(mutex_);
  if (const auto found = shut_.find(channel); found != shut_.end()) {
    shut = std::move(found->second);
    shut_.erase(found);
  }
  auto it = known_.find(channel);
  if (it == known_.end()) return std::nullopt;
  const std::uint32_t rank = it->second.peer.rank;
  if (peers_[rank].channel.get() == channel) peers_[rank].channel = nullptr;
  known_.erase(it);
  return rank;
}

bool Links::departed(const LinkMember& member, const Error& reason) {
  {
    MutexLock lock(mutex_);
    auto found = peers_.find(member.info.rank);
    if (found == peers_.end() || found->second.departed || found->second.member.instance != member.instance)
      return false;
    found->second.departed = reason;
  }
  close_channels_of(member.info.rank);
  return true;
}

std::vector<LinkMember> Links::present() const {
  std::vector<LinkMember> members;
  MutexLock lock(mutex_);
  for (const auto& [rank, peer] : peers_) {
    if (!peer.departed) members.push_back(peer.member);
  }
  return members;
}

/// What they still send is not heard any more.
void Links::close_channels_of(std::optional<std::uint32_t> rank) {
  std::map<std::uint64_t, std::shared_ptr<net::Channel>> channels;  // in the order in which they became known
  {
    MutexLock lock(mutex_);
    for (const auto& [key, known] : known_) {
      if (!rank || known.peer.rank == *rank) channels[known.number] = known.channel;
    }
    for (const auto& [number, channel] : channels) {
      const auto peer = peers_.find(known_.at(channel.get()).peer.rank);
      if (peer != peers_.end() && peer->second.channel == channel) peer->second.channel = nullptr;
      known_.erase(channel.get());
      shut_[channel.get()] = channel;
    }
  }
  for (const auto& [number, channel] : channels) channel->close();
}

bool Links::is_present(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  auto found = peers_.find(rank);
  return found != peers_.end() && !found->second.departed;
}

void Links::close_all() { close_channels_of(std::nullopt); }

}  // namespace torchspan::rpc
