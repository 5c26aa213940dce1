#include "rpc/links.h"

#include <fmt/format.h>

namespace torchspan::rpc {
namespace {
constexpr Duration kDialLimit = std::chrono::seconds(5);
}

Links::Links(net::Transport& transport, Executor& executor, std::uint32_t self,
             std::vector<LinkMember> members)
    : transport_(transport),
      executor_(executor),
      self_(self),
      members_(std::move(members)),
      peers_(members_.size()) {}

Bytes Links::hello_frame() const {
  const LinkMember& me = members_[self_];
  wire::Payload payload = wire::to_payload(Hello{me.info.name, me.info.rank, me.epoch});
  wire::Frame frame;
  frame.header.type = Hello::kType;
  frame.header.flags = wire::kFlagOneWay;
  frame.header.epoch = me.epoch;
  frame.value = std::move(payload.value);
  return wire::encode_frame(frame);
}

std::shared_ptr<net::Channel> Links::to(std::uint32_t rank) {
  MutexLock lock(mutex_);
  Peer& peer = peers_[rank];
  if (peer.departed) throw *peer.departed;
  if (!peer.channel) {
    auto channel = transport_.connect(members_[rank].address, executor_.deadline_in(kDialLimit));
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

void Links::greet(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  if (hello.rank >= members_.size() || members_[hello.rank].info.name != hello.name ||
      members_[hello.rank].epoch != hello.epoch || hello.rank == self_) {
    throw Error(
        ErrorKind::kDenied,
        fmt::format(
            "a peer calls itself '{}' (rank {}, epoch {:x}), which is no member of this world; a worker "
            "of an earlier run may still be alive",
            hello.name, hello.rank, hello.epoch));
  }
  MutexLock lock(mutex_);
  known_[channel.get()] = {hello.rank, channel};
  Peer& peer = peers_[hello.rank];
  if (!peer.channel) peer.channel = channel;
}

std::optional<std::uint32_t> Links::closed(const net::Channel* channel) {
  MutexLock lock(mutex_);
  auto it = known_.find(channel);
  if (it == known_.end()) return std::nullopt;
  const std::uint32_t rank = it->second.first;
  known_.erase(it);
  if (peers_[rank].channel.get() == channel) peers_[rank].channel = nullptr;
  return rank;
}

bool Links::departed(std::uint32_t rank, const Error& reason) {
  MutexLock lock(mutex_);
  if (peers_[rank].departed) return false;
  peers_[rank].departed = reason;
  return true;
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
