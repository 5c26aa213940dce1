#include "collective/point_to_point/pair_connections.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <span>

#include <torchspan/detail/core/runtime.h>

#include "collective/point_to_point/message_loop.h"

namespace torchspan::collective {
namespace {

using channels::Hello;
using channels::Note;

/// How long the end waits for the peers to acknowledge it.
constexpr Duration kPairLinger = std::chrono::seconds(3);

Segment pair_probe() {
  static constexpr std::array<std::byte, channels::kProbeBytes> kZeros{};
  return {kZeros.data(), kZeros.size(), {}};
}

void send_to(net::Channel& channel, const Bytes& header, const std::optional<Segment>& segment) {
  try {
    channel.send(header, segment ? std::span(&*segment, 1) : std::span<const Segment>());
  } catch (const Error&) {  // it has ended: on_closed() reports it
  }
}

}  // namespace

PairConnections::PairConnections(PairPlan plan, PairEvents& events)
    : plan_(std::move(plan)),
      events_(events),
      executor_(plan_.world->runtime()->executor),
      closed_(executor_.make_parker()),
      peers_(plan_.ranks.size()) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
  const auto now = static_cast<std::uint64_t>(executor_.now().time_since_epoch().count());
  nonce_ = (plan_.group ^ plan_.world->self().instance ^ now) * kOdd;
  auto listening = plan_.world->ask([&](rendezvous::Membership& world) {
    return world.listen(fmt::format("messages.{:x}", nonce_), *this);
  });
  transport_ = std::move(listening.transport);
  address_ = std::move(listening.address);
  {
    MutexLock lock(meetings_->mutex);
    meetings_->transport = transport_.get();
  }
  thread_ = executor_.spawn("messages", [this] { run(); });
}

PairConnections::~PairConnections() { stop(); }

void PairConnections::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  {
    MutexLock lock(meetings_->mutex);
    meetings_->transport = nullptr;
  }
  end(channels::End{"has destroyed its group"});
  const Deadline until = executor_.deadline_in(kPairLinger);
  while (connected() && closed_->park(until)) {
  }
  ending_.store(true);
  transport_->wake();
  thread_.join();
}

void PairConnections::run() {
  while (!ending_.load()) {
    while (transport_->poll() && !ending_.load()) {
    }
    if (ending_.load()) return;
    connect_pending();
    transport_->wait(events_.look());
  }
}

void PairConnections::open(int rank) {
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.opened || stopping_.load()) return;
    peer.opened = true;
  }
  const int self = plan_.ranks[static_cast<std::size_t>(plan_.rank)];
  const int other = plan_.ranks[static_cast<std::size_t>(rank)];
  ByteWriter mine;
  mine.put(nonce_);
  mine.put_string(address_);
  const auto done = [meetings = meetings_, rank](std::vector<Bytes> both, std::optional<Error> failure) {
    MutexLock lock(meetings->mutex);
    if (meetings->transport == nullptr) return;
    meetings->pending.push_back({rank, std::move(both), std::move(failure)});
    meetings->transport->wake();
  };
  try {
    plan_.world->ask([&](rendezvous::Membership& world) {
      // Operations have deadlines; another rank may ask for the connection at any time.
      world.all_gather_bytes_once(fmt::format("torchspan.messages.{:x}", plan_.group), mine.bytes(),
                                  {self, other}, done);
    });
  } catch (const Error& error) {
    lost(rank, error, Loss::kAbsence);
  }
}

void PairConnections::connect_pending() {
  std::vector<Meeting> pending;
  {
    MutexLock lock(meetings_->mutex);
    pending.swap(meetings_->pending);
  }
  for (const Meeting& meeting : pending) {
    try {
      if (meeting.failure) throw Error(*meeting.failure);
      connect(meeting);
    } catch (const Error& error) {
      lost(meeting.rank, error, Loss::kAbsence);
    }
  }
}

void PairConnections::connect(const Meeting& meeting) {
  const auto index = static_cast<std::size_t>(meeting.rank);
  const bool first = plan_.ranks[index] < plan_.ranks[static_cast<std::size_t>(plan_.rank)];
  ByteReader theirs(meeting.both.at(first ? 0 : 1));
  const auto nonce = theirs.get<std::uint64_t>();
  const std::string address = theirs.get_string();
  if (meeting.rank > plan_.rank) return;  // it dials
  const Bytes hello = encode(Hello{nonce, static_cast<std::uint32_t>(plan_.rank)});
  const Segment probe = pair_probe();
  MutexLock lock(mutex_);  // end() closes the channels that it finds
  if (stopping_.load()) return;
  const auto channel = transport_->connect(address, executor_.deadline_in(plan_.timeout));
  peers_[index].channel = channel;
  peers_[index].nonce = nonce;
  channel->send(hello, std::span(&probe, 1));
}

void PairConnections::lost(int rank, const Error& cause, Loss how) {
  if (cause.kind() == ErrorKind::kCancelled)
    return;  // the end of this worker's world is reported to the group
  events_.lost(rank,
               Error(cause.kind(), fmt::format("no connection to {}: {}",
                                               plan_.peers[static_cast<std::size_t>(rank)], cause.message())),
               how);
}

void PairConnections::send(int rank, const Note& note, std::optional<Segment> segment) {
  std::shared_ptr<net::Channel> channel;
  Bytes header = encode(note);
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!peer.ready) {
      peer.queue.push_back({std::move(header), std::move(segment)});
      return;
    }
    channel = peer.channel;
  }
  if (channel) send_to(*channel, header, segment);
}

/// Later messages are queued behind those that it sends, until none is left.
void PairConnections::send_queued(int rank) {
  for (;;) {
    std::deque<Unsent> queue;
    std::shared_ptr<net::Channel> channel;
    {
      MutexLock lock(mutex_);
      Peer& peer = peers_[static_cast<std::size_t>(rank)];
      peer.ready = peer.queue.empty();
      if (peer.ready) return;
      queue.swap(peer.queue);
      channel = peer.channel;
    }
    for (const Unsent& one : queue) {
      if (channel) send_to(*channel, one.header, one.segment);
    }
  }
}

std::size_t PairConnections::unsent_bytes(int rank) {
  MutexLock lock(mutex_);
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return peer.channel ? peer.channel->unsent_bytes() : 0;
}

void PairConnections::end(const Note& last) {
  std::vector<std::shared_ptr<net::Channel>> channels;
  {
    MutexLock lock(mutex_);
    stopping_.store(true);
    for (const Peer& peer : peers_) {
      if (peer.channel) channels.push_back(peer.channel);
    }
  }
  const Bytes header = encode(last);
  for (const auto& channel : channels) {
    send_to(*channel, header, std::nullopt);
    channel->close();
  }
}

bool PairConnections::connected() {
  MutexLock lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.channel != nullptr; });
}

std::optional<int> PairConnections::rank_of(const net::Channel& channel) {
  MutexLock lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].channel.get() == &channel) return static_cast<int>(rank);
  }
  return std::nullopt;
}

void PairConnections::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  const std::optional<int> rank = rank_of(*channel);
  try {
    const Note note = channels::decode(message.header);
    if (const auto* hello = std::get_if<Hello>(&note)) {
      meet(channel, *hello);
    } else if (!rank) {
      channel->close();
    } else {
      if (std::holds_alternative<channels::End>(note)) {
        MutexLock lock(mutex_);
        peers_[static_cast<std::size_t>(*rank)].ended = true;
      }
      events_.received(*rank, note, message.segments.empty() ? Buffer() : std::move(message.segments[0]));
    }
  } catch (const Error& error) {
    channel->close();
    if (!rank) return;
    events_.lost(*rank, MessageErrors(plan_).invalid(*rank, error), Loss::kFailure);
  }
}

void PairConnections::meet(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
  bool answer = false;
  {
    MutexLock lock(mutex_);
    const auto rank = static_cast<std::size_t>(hello.rank);
    if (rank >= peers_.size() || stopping_.load()) return channel->close();
    Peer& peer = peers_[rank];
    answer = static_cast<int>(hello.rank) > plan_.rank;
    const std::uint64_t expected = answer ? nonce_ : peer.nonce;
    const bool fits = answer ? peer.channel == nullptr : peer.channel == channel;
    if (hello.nonce != expected || !fits || peer.met) return channel->close();
    peer.channel = channel;
    peer.met = true;
  }
  if (answer) {
    const Segment probe = pair_probe();
    channel->send(encode(Hello{hello.nonce, static_cast<std::uint32_t>(plan_.rank)}), std::span(&probe, 1));
  }
  send_queued(static_cast<int>(hello.rank));
}

void PairConnections::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const std::optional<int> rank = rank_of(*channel);
  if (!rank) return;
  const std::string& name = plan_.peers[static_cast<std::size_t>(*rank)];
  bool met = false, expected = false;
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(*rank)];
    peer.channel.reset();
    met = peer.met;
    expected = peer.ended || stopping_.load();
  }
  closed_->unpark();
  if (expected) return;
  if (!met) return lost(*rank, Error(ErrorKind::kDisconnected, reason.message()), Loss::kAbsence);
  events_.lost(*rank, Error(ErrorKind::kDisconnected, fmt::format("{} is gone: {}", name, reason.message())),
               Loss::kFailure);
}

}  // namespace torchspan::collective
