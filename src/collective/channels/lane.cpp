#include "collective/channels/lane.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>

namespace torchspan::collective::channels {
namespace {

/// How long the end of a lane waits for the peers to acknowledge it.
constexpr Duration kLinger = std::chrono::seconds(3);

Segment probe() {
  static constexpr std::array<std::byte, kProbeBytes> kZeros{};
  return {kZeros.data(), kZeros.size(), {}};
}

}  // namespace

Lane::Lane(Executor& executor, Plan plan, Inbox& inbox, LaneEvents& events)
    : executor_(executor),
      plan_(std::move(plan)),
      inbox_(inbox),
      events_(events),
      peers_(plan_.peers.size()),
      closed_(executor.make_parker()) {}

void Lane::listen(const MakeTransport& make) {
  Listening listening = make(*this);
  transport_ = std::move(listening.transport);
  address_ = std::move(listening.address);
  thread_ = executor_.spawn("group lane", [this] { run(); });
}

Lane::~Lane() { stop(); }

void Lane::stop() {
  if (!thread_.joinable()) return;
  end("has destroyed its group");
  const Deadline until = executor_.deadline_in(kLinger);
  const auto open = [&] {
    MutexLock lock(mutex_);
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.channel != nullptr; });
  };
  while (open() && closed_->park(until)) {
  }
  stopping_.store(true);
  transport_->wake();
  thread_.join();
}

void Lane::run() {
  while (!stopping_.load()) {
    while (transport_->poll() && !stopping_.load()) {
    }
    if (!stopping_.load()) transport_->wait(Deadline::never());
  }
}

void Lane::dial(const std::vector<Target>& targets, Deadline deadline) {
  for (int rank = 0; rank < static_cast<int>(targets.size()); ++rank) {
    const Target& target = targets[static_cast<std::size_t>(rank)];
    {
      MutexLock lock(mutex_);
      peers_[static_cast<std::size_t>(rank)].address = target.address;
      peers_[static_cast<std::size_t>(rank)].nonce = target.nonce;
    }
    if (rank >= plan_.rank) continue;
    const Bytes hello = encode(Hello{target.nonce, static_cast<std::uint32_t>(plan_.rank)});
    const Segment segment = probe();
    try {
      // Registered before the first event of the channel can arrive: the lock is held.
      MutexLock lock(mutex_);
      const auto channel = transport_->connect(target.address, deadline);
      peers_[static_cast<std::size_t>(rank)].channel = channel;
      channel->send(hello, std::span(&segment, 1));
    } catch (const Error& error) {
      MutexLock lock(mutex_);
      peers_[static_cast<std::size_t>(rank)].trouble = error.message();
    }
  }
  events_.changed();
}

bool Lane::connected() {
  MutexLock lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (static_cast<int>(rank) != plan_.rank && !peers_[rank].met) return false;
  }
  return true;
}

bool Lane::refused() {
  MutexLock lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.trouble.empty(); });
}

std::vector<std::string> Lane::missing() {
  std::vector<std::string> missing;
  MutexLock lock(mutex_);
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const Peer& peer = peers_[index];
    if (rank == plan_.rank || peer.met) continue;
    std::string why = peer.trouble;
    if (why.empty() && rank > plan_.rank) {
      why = fmt::format("it has not connected to {}", address_);
    } else if (why.empty()) {
      why = fmt::format(
          "the connection opened, but {} bytes did not pass in time: does the path drop large packets (MTU)?",
          kProbeBytes);
    }
    missing.push_back(fmt::format("{} at {}: {}", plan_.peers[index], peer.address, why));
  }
  return missing;
}

std::shared_ptr<net::Channel> Lane::channel_to(int rank) {
  MutexLock lock(mutex_);
  return peers_[static_cast<std::size_t>(rank)].channel;
}

void Lane::send(int rank, BytesView header, std::span<const Segment> segments) {
  const auto channel = channel_to(rank);
  if (!channel) {
    throw Error(ErrorKind::kDisconnected,
                fmt::format("{} has closed its connection, and the group cannot continue without it",
                            plan_.peers[static_cast<std::size_t>(rank)]));
  }
  try {
    channel->send(header, segments);
  } catch (const Error& error) {
    // The connection broke, and its end is not reported yet.
    throw Error(error.kind(), fmt::format("{} cannot be reached: {}",
                                          plan_.peers[static_cast<std::size_t>(rank)], error.message()));
  }
}

std::size_t Lane::unsent_bytes(int rank) {
  const auto channel = channel_to(rank);
  return channel ? channel->unsent_bytes() : 0;
}

void Lane::end(const std::string& why) {
  std::vector<std::shared_ptr<net::Channel>> channels;
  {
    MutexLock lock(mutex_);
    if (ending_) return;
    ending_ = true;
    for (const Peer& peer : peers_) {
      if (peer.channel) channels.push_back(peer.channel);
    }
  }
  const Bytes note = encode(End{why});
  for (const auto& channel : channels) {
    try {
      channel->send(note, {});
    } catch (const Error&) {  // it has ended already
    }
    channel->close();
  }
}

std::optional<int> Lane::rank_of(const net::Channel& channel) {
  MutexLock lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].channel.get() == &channel) return static_cast<int>(rank);
  }
  return std::nullopt;
}

void Lane::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  std::optional<int> rank = rank_of(*channel);
  try {
    const Note note = decode(message.header);
    if (const auto* hello = std::get_if<Hello>(&note)) {
      meet(channel, *hello);
    } else if (rank) {
      receive(*rank, note, message);
    } else {
      channel->close();
    }
  } catch (const Error& error) {
    if (!rank) return channel->close();
    events_.failed(Error(ErrorKind::kInvalid,
                         fmt::format("{} sent an invalid message to the group: {}; do all ranks run the same "
                                     "version of TorchSpan?",
                                     plan_.peers[static_cast<std::size_t>(*rank)], error.message())));
  }
}

void Lane::meet(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  bool answer = false;
  {
    MutexLock lock(mutex_);
    const auto rank = static_cast<std::size_t>(hello.rank);
    if (rank >= peers_.size() || ending_) return channel->close();
    Peer& peer = peers_[rank];
    answer = static_cast<int>(hello.rank) > plan_.rank;
    const std::uint64_t expected = answer ? plan_.nonce : peer.nonce;
    const bool fits = answer ? peer.channel == nullptr : peer.channel == channel;
    if (hello.nonce != expected || !fits) return channel->close();
    peer.channel = channel;
    peer.met = true;
  }
  if (answer) {
    const Segment segment = probe();
    channel->send(encode(Hello{hello.nonce, static_cast<std::uint32_t>(plan_.rank)}), std::span(&segment, 1));
  }
  events_.changed();
}

void Lane::receive(int rank, const Note& note, net::Message& message) {
  if (const auto* part = std::get_if<Part>(&note)) {
    if (message.segments.size() != 1) throw Error(ErrorKind::kInvalid, "a part has one segment");
    inbox_.put({rank, part->operation, part->part}, part->calls, std::move(message.segments[0]));
  } else if (const auto* abort = std::get_if<Abort>(&note)) {
    events_.aborted(Error(abort->kind, abort->text), abort->from_call);
  } else if (const auto* end = std::get_if<End>(&note)) {
    {
      MutexLock lock(mutex_);
      peers_[static_cast<std::size_t>(rank)].ended = true;
    }
    inbox_.end(rank, plan_.number, end->text);
  }
}

void Lane::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const std::optional<int> rank = rank_of(*channel);
  if (!rank) return;
  bool expected = false, met = false;
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(*rank)];
    peer.channel.reset();
    met = peer.met;
    expected = peer.ended || ending_;
    if (!met) peer.trouble = reason.message();
  }
  closed_->unpark();
  if (!met) return events_.changed();
  if (expected) return inbox_.end(*rank, plan_.number, "has closed its connection");
  events_.lost(*rank, reason.message());
}

}  // namespace torchspan::collective::channels
