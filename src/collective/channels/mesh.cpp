#include "collective/channels/mesh.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>
#include <unistd.h>

#include "core/api/agreement.h"

namespace torchspan::collective::channels {
namespace {

/// How long the end of a lane waits for the peers to acknowledge it.
constexpr Duration kLinger = std::chrono::seconds(3);

Segment probe() {
  static constexpr std::array<std::byte, kProbeBytes> kZeros{};
  return {kZeros.data(), kZeros.size(), {}};
}

}  // namespace

Lane::Lane(Executor& executor, Plan plan, Inbox& inbox, Mesh& mesh)
    : executor_(executor),
      plan_(std::move(plan)),
      inbox_(inbox),
      mesh_(mesh),
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
  end("has destroyed its group", std::nullopt);
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
  mesh_.changed();
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

void Lane::end(const std::string& why, const std::optional<Abort>& cause) {
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
    const GroupMessage note = decode(message.header);
    if (const auto* hello = std::get_if<Hello>(&note)) {
      accept(channel, *hello);
    } else if (rank) {
      receive(*rank, note, message);
    } else {
      channel->close();
    }
  } catch (const Error& error) {
    if (!rank) return channel->close();
    mesh_.abort(Error(ErrorKind::kInvalid,
                      fmt::format("{} sent an invalid message to the group: {}; do all ranks run the same "
                                  "version of TorchSpan?",
                                  plan_.peers[static_cast<std::size_t>(*rank)], error.message())));
  }
}

void Lane::accept(const std::shared_ptr<net::Channel>& channel, const Hello& hello) {
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
  mesh_.changed();
}

void Lane::receive(int rank, const GroupMessage& note, net::Message& message) {
  if (const auto* part = std::get_if<Part>(&note)) {
    if (message.segments.size() != 1) throw Error(ErrorKind::kInvalid, "a part has one segment");
    inbox_.put({rank, part->operation, part->part}, part->calls, std::move(message.segments[0]));
  } else if (const auto* abort = std::get_if<Abort>(&note)) {
    inbox_.fail(Error(abort->kind, abort->text), abort->from_call);
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
  if (!met) return mesh_.changed();
  if (expected) return inbox_.end(*rank, plan_.number, "has closed its connection");
  mesh_.lost(*rank, reason.message());
}

namespace {

/// Limit of one connection attempt: an unreachable host does not hold up the group for its whole timeout.
constexpr Duration kDialLimit = std::chrono::seconds(30);
constexpr Duration kBetweenLooks = std::chrono::milliseconds(100);
/// Unsent bytes for one rank and lane at which send() waits, and how long between checks.
constexpr std::size_t kMostUnsent = std::size_t{4} << 20;
constexpr Duration kForRoom = std::chrono::microseconds(500);
constexpr int kMostLanes = 16;

int default_lanes() { return ::sysconf(_SC_NPROCESSORS_ONLN) >= 8 ? 4 : 2; }

/// A number that differs for every group of every process; peers that dial an old address present another.
std::uint64_t make_nonce(const WorldLink& world, Executor& executor) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
  return (world.self().instance ^ static_cast<std::uint64_t>(executor.now().time_since_epoch().count())) *
         kOdd;
}

std::vector<rendezvous::Member> members_of(WorldLink& world, const std::vector<int>& ranks) {
  return world.ask([&](rendezvous::Membership& membership) {
    std::vector<rendezvous::Member> members;
    for (const int rank : ranks) members.push_back(membership.member(rank));
    return members;
  });
}

std::vector<std::string> names_of(const std::vector<rendezvous::Member>& members) {
  std::vector<std::string> names;
  for (const rendezvous::Member& member : members) names.push_back(describe(member));
  return names;
}

/// Where the lanes of one rank listen.
struct Places {
  std::uint64_t nonce = 0;
  std::vector<std::string> addresses = {};

  Bytes encode() const {
    ByteWriter writer;
    writer.put(nonce);
    writer.put(static_cast<std::uint32_t>(addresses.size()));
    for (const std::string& address : addresses) writer.put_string(address);
    return writer.take();
  }
  static Places decode(BytesView bytes) {
    ByteReader reader(bytes);
    Places places;
    places.nonce = reader.get<std::uint64_t>();
    for (std::size_t left = reader.get_count(4); left > 0; --left) {
      places.addresses.push_back(reader.get_string());
    }
    return places;
  }
};

}  // namespace

Mesh::Mesh(const std::shared_ptr<WorldLink>& world, std::vector<int> ranks, MeshOptions options)
    : executor_(world->runtime()->executor),
      world_(world),
      ranks_(std::move(ranks)),
      options_(options),
      rank_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), world->self().rank) - ranks_.begin())),
      members_(members_of(*world, ranks_)),
      peers_(names_of(members_)),
      connecting_(executor_.make_parker()),
      inbox_(executor_, peers_, rank_) {
  const Deadline deadline = executor_.deadline_in(options_.timeout);
  try {
    agree(*world, connect(*world, deadline), deadline);
  } catch (...) {
    stop_lanes("could not make its group");
    throw;
  }
}

Mesh::~Mesh() { stop_lanes("has destroyed its group"); }

/// All lanes send their last messages before the first one waits for its peers; until all have stopped, they report to
/// each other.
void Mesh::stop_lanes(const char* why) {
  const auto cause = inbox_.announcement();
  for (const auto& lane : lanes_) lane->end(why, cause);
  for (const auto& lane : lanes_) lane->stop();
}

std::vector<Bytes> Mesh::gather(WorldLink& world, BytesView mine, Deadline deadline) const {
  return world.ask([&](rendezvous::Membership& members) {
    return gather_in_order(members, options_.tag, mine, ranks_, deadline);
  });
}

/// Starts the lanes; returns their addresses.
std::vector<std::string> Mesh::listen(WorldLink& world, std::uint64_t nonce) {
  std::vector<std::string> addresses;
  const int wanted = options_.lanes > 0 ? options_.lanes : default_lanes();
  for (int number = 0; number < std::min(wanted, kMostLanes); ++number) {
    Lane::Plan plan{.number = number, .rank = rank_, .peers = peers_, .nonce = nonce};
    lanes_.push_back(std::make_unique<Lane>(executor_, std::move(plan), inbox_, *this));
    lanes_.back()->listen([&](net::Handler& handler) {
      return world.ask([&](rendezvous::Membership& members) {
        auto [transport, address] = members.listen(fmt::format("group.{:x}.{}", nonce, number), handler);
        return Listening{std::move(transport), std::move(address)};
      });
    });
    addresses.push_back(lanes_.back()->address());
  }
  return addresses;
}

/// Returns what went wrong on this rank; nullopt if it is connected to all others.
std::optional<Error> Mesh::connect(WorldLink& world, Deadline deadline) {
  Places mine{.nonce = make_nonce(world, executor_)};
  std::optional<Error> trouble;
  try {
    mine.addresses = listen(world, mine.nonce);
  } catch (...) {  // without addresses, no rank connects
    const Error error = to_error(std::current_exception());
    // Overloaded: no descriptor is left.
    const bool overloaded = error.kind() == ErrorKind::kOverloaded;
    trouble = Error(overloaded ? ErrorKind::kOverloaded : ErrorKind::kDisconnected,
                    fmt::format("cannot listen: {}", error.message()));
  }
  std::vector<Places> places;
  std::size_t count = lanes_.size();
  for (const Bytes& theirs : gather(world, mine.encode(), deadline)) {
    places.push_back(Places::decode(theirs));
    count = std::min(count, places.back().addresses.size());
  }
  if (trouble) return trouble;
  lane_count_ = static_cast<int>(count);
  const Deadline limit = earlier(deadline, executor_.deadline_in(kDialLimit));
  for (std::size_t lane = 0; lane < count; ++lane) {
    std::vector<Lane::Target> targets;
    for (const Places& its : places) targets.push_back({its.addresses[lane], its.nonce});
    lanes_[lane]->dial(targets, limit);
  }
  const std::span used(lanes_.data(), count);
  const auto all = [&](auto is) { return std::all_of(used.begin(), used.end(), is); };
  const auto any = [&](auto is) { return std::any_of(used.begin(), used.end(), is); };
  while (!all([](const auto& lane) { return lane->connected(); })) {
    if (any([](const auto& lane) { return lane->refused(); }) || limit.passed(executor_.now())) break;
    if (const auto ended = world.ended()) throw Error(*ended);
    connecting_->park(earlier(limit, executor_.deadline_in(kBetweenLooks)));
  }
  std::vector<std::string> missing;
  for (const auto& lane : used) {
    for (std::string& one : lane->missing()) missing.push_back(std::move(one));
  }
  if (missing.empty()) return std::nullopt;
  return Error(ErrorKind::kDisconnected, fmt::format("has no connection to {}", fmt::join(missing, "; ")));
}

/// Throws on all ranks if one of them is not connected.
void Mesh::agree(WorldLink& world, std::optional<Error> mine, Deadline deadline) {
  const auto outcomes = gather_outcomes([&](BytesView bytes) { return gather(world, bytes, deadline); },
                                        {.failure = std::move(mine)});
  std::vector<std::string> troubles;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const auto& failure = outcomes[rank].failure;
    if (!failure) continue;
    troubles.push_back(fmt::format("{} {}", peers_[rank], failure->message()));
    if (failure->kind() == ErrorKind::kOverloaded) throw Error(failure->kind(), troubles.back());
  }
  if (troubles.empty()) return;
  throw Error(ErrorKind::kDisconnected,
              fmt::format("the ranks of a group connect to each other directly, but {}; let every host reach "
                          "the others' ports (TORCHSPAN_PORT_RANGE limits them) and addresses "
                          "(TORCHSPAN_LISTEN_HOST chooses one)",
                          fmt::join(troubles, "; ")));
}

void Mesh::abort(const Error& cause, std::uint64_t from_call) {
  if (!inbox_.fail(cause, from_call)) return;
  const Bytes note = encode(inbox_.announcement().value());
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || lanes_.empty()) continue;
    try {
      lanes_[0]->send(rank, note, {});
    } catch (const Error&) {  // it has ended: nothing to announce
    }
  }
}

/// On the lane's thread, which has nothing else to do for a group that breaks.
void Mesh::lost(int rank, const std::string& why) {
  if (inbox_.failure()) return;
  std::vector<std::uint64_t> instances;
  for (const rendezvous::Member& member : members_) instances.push_back(member.instance);
  const auto place = static_cast<std::size_t>(rank);
  const std::string how = fmt::format("the connection to {} ended: {}", peers_[place], why);
  abort(Error(ErrorKind::kDisconnected, fmt::format("{}; the group cannot continue without it",
                                                    world_->cause_of_loss(instances, peers_, {place, how}))));
}

void Mesh::end(const Error& reason) {
  const auto cause = inbox_.announcement();  // not this rank's own end
  inbox_.fail(reason, 0);
  for (const auto& lane : lanes_) lane->end("has left the group", cause);
}

void Mesh::begin_operation() {
  ++operation_;
  deadline_ = executor_.deadline_in(options_.timeout);
}

void Mesh::begin_call(std::uint64_t calls) {
  calls_.store(calls, std::memory_order_relaxed);
  inbox_.begin(calls);
}

void Mesh::wait_for_room(int to, Lane& lane) {
  while (lane.unsent_bytes(to) > kMostUnsent) {
    inbox_.pause(kForRoom);
    if (!deadline_.passed(executor_.now())) continue;
    throw Error(ErrorKind::kTimedOut, fmt::format("{} does not take the data of this operation",
                                                  peers_[static_cast<std::size_t>(to)]));
  }
}

void Mesh::send(int to, std::uint32_t part, BytesView data) {
  Lane& lane = *lanes_[static_cast<std::size_t>(lane_of(part))];
  wait_for_room(to, lane);
  inbox_.throw_if_failed();
  const Segment segment{data.data(), data.size(), {}};
  lane.send(to, encode(Part{operation_, part, calls_.load(std::memory_order_relaxed)}),
            std::span(&segment, 1));
}

Buffer Mesh::take(int from, std::uint32_t part, std::size_t size) {
  Buffer data = inbox_.take({from, operation_, part}, lane_of(part), deadline_);
  if (data.size == size) return data;
  throw Error(ErrorKind::kInvalid,
              fmt::format("{} sent {} bytes where {} were expected: do all ranks run the same version of "
                          "TorchSpan?",
                          peers_[static_cast<std::size_t>(from)], data.size, size));
}

}  // namespace torchspan::collective::channels
