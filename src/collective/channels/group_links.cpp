#include "collective/channels/group_links.h"

#include <algorithm>
#include <array>

namespace torchspan::collective::channels {
namespace {

/// How long the end waits for the peers to acknowledge it.
constexpr Duration kLinger = std::chrono::seconds(3);

void send_hello(net::Channel& channel, const Hello& hello) {
  static constexpr std::array<std::byte, kProbeBytes> kZeros{};
  const Segment probe{kZeros.data(), kZeros.size(), {}};
  channel.send(encode(hello), std::span(&probe, 1));
}

}  // namespace

GroupLinks::GroupLinks(WorldLink& world, LinksPlan plan, LinkListener& listener)
    : executor_(world.runtime()->executor),
      plan_(std::move(plan)),
      listener_(listener),
      peers_(static_cast<std::size_t>(plan_.ranks)),
      closed_(executor_.make_parker()) {
  auto listening =
      world.ask([&](rendezvous::Membership& members) { return members.listen(plan_.name, *this); });
  transport_ = std::move(listening.transport);
  address_ = std::move(listening.address);
  thread_ = executor_.spawn("group links", [this] { run(); });
}

GroupLinks::~GroupLinks() { stop("has destroyed its group", std::nullopt); }

std::uint64_t GroupLinks::make_nonce(const WorldLink& world, std::uint64_t salt) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
  const auto now = static_cast<std::uint64_t>(world.runtime()->executor.now().time_since_epoch().count());
  return (salt ^ world.self().instance ^ now) * kOdd;
}

void GroupLinks::run() {
  while (!stopping_.load()) {
    while (transport_->poll() && !stopping_.load()) {
    }
    if (!stopping_.load()) transport_->wait(listener_.poll());
  }
}

void GroupLinks::dial(int rank, const std::string& address, std::uint64_t nonce, Deadline deadline) {
  MutexLock lock(mutex_);  // the channel is registered before its first event, and end() finds it
  if (ending_) return;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const auto channel = transport_->connect(address, deadline);
  peer.channel = channel;
  peer.nonce = nonce;
  send_hello(*channel, {nonce, static_cast<std::uint32_t>(plan_.rank)});
}

bool GroupLinks::has_met(int rank) {
  MutexLock lock(mutex_);
  return peers_[static_cast<std::size_t>(rank)].met;
}

std::shared_ptr<net::Channel> GroupLinks::channel_to(int rank) {
  MutexLock lock(mutex_);
  return peers_[static_cast<std::size_t>(rank)].channel;
}

std::size_t GroupLinks::unsent_bytes(int rank) {
  const auto channel = channel_to(rank);
  return channel ? channel->unsent_bytes() : 0;
}

void GroupLinks::end(const std::string& why, const std::optional<Abort>& cause) {
  std::vector<std::shared_ptr<net::Channel>> channels;
  {
    MutexLock lock(mutex_);
    if (ending_) return;
    ending_ = true;
    for (const Peer& peer : peers_) {
      if (peer.channel) channels.push_back(peer.channel);
    }
  }
  const Bytes first = cause ? encode(*cause) : Bytes(), last = encode(End{why});
  for (const auto& channel : channels) {
    try {
      if (cause) channel->send(first, {});
      channel->send(last, {});
    } catch (const Error&) {  // it has ended already
    }
    channel->close();
  }
}

void GroupLinks::stop(const std::string& why, const std::optional<Abort>& cause) {
  if (!thread_.joinable()) return;
  end(why, cause);
  const Deadline until = executor_.deadline_in(kLinger);
  while (has_connections() && closed_->park(until)) {
  }
  stopping_.store(true);
  transport_->wake();
  thread_.join();
}

bool GroupLinks::has_connections() {
  MutexLock lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.channel != nullptr; });
}

std::optional<int> GroupLinks::rank_of(const net::Channel& channel) {
  MutexLock lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].channel.get() == &channel) return static_cast<int>(rank);
  }
  return std::nullopt;
}

void GroupLinks::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  const std::optional<int> rank = rank_of(*channel);
  try {
    const GroupMessage decoded = decode(message.header);
    if (const auto* hello = std::get_if<Hello>(&decoded)) {
      accept(channel, *hello);
    } else if (!rank) {
      channel->close();
    } else {
      if (std::holds_alternative<End>(decoded)) {
        MutexLock lock(mutex_);
        peers_[static_cast<std::size_t>(*rank)].ended = true;
      }
      listener_.on_group_message(*this, *rank, decoded, std::move(message.segments));
    }
  } catch (const Error& error) {
    if (!rank) return channel->close();
    listener_.on_invalid(*this, *rank, error);
  }
}

void GroupLinks::accept(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  bool answer = false;
  {
    MutexLock lock(mutex_);
    const auto rank = static_cast<std::size_t>(hello.rank);
    if (rank >= peers_.size() || ending_) return channel->close();
    Peer& peer = peers_[rank];
    answer = static_cast<int>(hello.rank) > plan_.rank;
    const std::uint64_t expected = answer ? plan_.nonce : peer.nonce;
    const bool fits = answer ? peer.channel == nullptr : peer.channel == channel;
    if (hello.nonce != expected || !fits || peer.met) return channel->close();
    peer.channel = channel;
    peer.met = true;
  }
  if (answer) send_hello(*channel, {hello.nonce, static_cast<std::uint32_t>(plan_.rank)});
  listener_.on_met(*this, static_cast<int>(hello.rank));
}

void GroupLinks::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const std::optional<int> rank = rank_of(*channel);
  if (!rank) return;
  LinkEnd how = LinkEnd::kLost;
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(*rank)];
    peer.channel.reset();
    if (ending_ || (peer.met && peer.ended)) {
      how = LinkEnd::kExpected;
    } else if (!peer.met) {
      how = LinkEnd::kNeverMet;
    }
  }
  closed_->unpark();
  listener_.on_end(*this, *rank, how, reason);
}

}  // namespace torchspan::collective::channels
