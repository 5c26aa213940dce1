#include "rpc/links.h"

#include <fmt/format.h>

namespace torchspan::rpc {
namespace {
constexpr Duration kDialLimit = std::chrono::seconds(5);
}

Links::Links(net::Transport& transport, Executor& executor, LinkMember self)
    : transport_(transport), executor_(executor), self_(std::move(self)) {}

Bytes Links::hello_frame() const {
  wire::Payload payload = wire::to_payload(Hello{self_.info.name, self_.info.rank, self_.epoch});
  wire::Frame frame;
  frame.header.type = Hello::kType;
  frame.header.flags = wire::kFlagOneWay;
  frame.header.epoch = self_.epoch;
  frame.value = std::move(payload.value);
  return wire::encode_frame(frame);
}

void Links::add(LinkMember member) {
  std::vector<std::shared_ptr<net::Channel>> old;
  {
    MutexLock lock(mutex_);
    const std::uint32_t rank = member.info.rank;
    for (auto& [key, known] : known_) {
      if (known.first == rank) old.push_back(known.second);
    }
    peers_[rank] = Peer{std::move(member), nullptr, std::nullopt};
  }
  for (const auto& channel : old) channel->close();
}

bool Links::knows(const LinkMember& member) const {
  MutexLock lock(mutex_);
  auto found = peers_.find(member.info.rank);
  return found != peers_.end() && found->second.member.epoch == member.epoch;
}

std::shared_ptr<net::Channel> Links::to(std::uint32_t rank) {
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
    known_[channel.get()] = {rank, channel};
    peer.channel = std::move(channel);
  }
  return peer.channel;
}

std::optional<std::uint32_t> Links::peer_of(const net::Channel* channel) const {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  return it == known_.end() ? std::nullopt : std::optional(it->second.first);
}

bool Links::greet(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  MutexLock lock(mutex_);
  auto found = peers_.find(hello.rank);
  if (found == peers_.end() || found->second.departed || hello.rank == self_.info.rank) return false;
  Peer& peer = found->second;
  if (peer.member.info.name != hello.name || peer.member.epoch != hello.epoch) return false;
  known_[channel.get()] = {hello.rank, channel};
  if (!peer.channel) peer.channel = channel;
  return true;
}

void Links::drop(const net::Channel* channel) {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  if (it == known_.end()) return;
  Peer& peer = peers_[it->second.first];
  if (peer.channel.get() == channel) peer.channel = nullptr;
}

std::optional<std::uint32_t> Links::closed(const net::Channel* channel) {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  if (it == known_.end()) return std::nullopt;
  const std::uint32_t rank = it->second.first;
  if (peers_[rank].channel.get() == channel) peers_[rank].channel = nullptr;
  known_.erase(it);
  return rank;
}

bool Links::departed(const LinkMember& member, const Error& reason) {
  MutexLock lock(mutex_);
  auto found = peers_.find(member.info.rank);
  if (found == peers_.end() || found->second.departed || found->second.member.epoch != member.epoch)
    return false;
  found->second.departed = reason;
  return true;
}

bool Links::is_present(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  auto found = peers_.find(rank);
  return found != peers_.end() && !found->second.departed;
}

void Links::close_all() {
  std::vector<std::shared_ptr<net::Channel>> channels;
  {
    MutexLock lock(mutex_);
    for (auto& [key, known] : known_) channels.push_back(known.second);
  }
  for (auto& channel : channels) channel->close();
}

}  // namespace torchspan::rpc
