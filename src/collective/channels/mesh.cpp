#include "collective/channels/mesh.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>
#include <unistd.h>

#include "core/api/agreement.h"
#include "core/api/throw_invalid.h"

namespace torchspan::collective::channels {
namespace {

/// Limit of one connection attempt: an unreachable host does not hold up the group for its whole timeout.
constexpr Duration kDialLimit = std::chrono::seconds(30);
constexpr Duration kBetweenLooks = std::chrono::milliseconds(100);
/// Unsent bytes for one rank and lane at which send() waits, and how long between checks.
constexpr std::size_t kMostUnsent = std::size_t{4} << 20;
constexpr Duration kForRoom = std::chrono::microseconds(500);
constexpr int kMostLanes = 16;

int default_lanes() { return ::sysconf(_SC_NPROCESSORS_ONLN) >= 8 ? 4 : 2; }

GroupMembers members_of(WorldLink& world, const std::vector<int>& ranks) {
  return world.ask([&](rendezvous::Membership& membership) {
    std::vector<rendezvous::Member> members;
    for (const int rank : ranks) members.push_back(membership.member(rank));
    return GroupMembers::of(members);
  });
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

Mesh::Mesh(const std::shared_ptr<WorldLink>& world, const std::vector<int>& ranks, MeshOptions options)
    : executor_(world->runtime()->executor),
      world_(world),
      options_(options),
      members_(members_of(*world, ranks)),
      rank_(static_cast<int>(std::ranges::find(ranks, world->self().rank) - ranks.begin())),
      connecting_(executor_.make_parker()),
      inbox_(executor_, members_.names, rank_) {
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
  for (const auto& lane : lanes_) lane->stop(why, cause);
}

/// Starts the lanes; returns their addresses.
std::vector<std::string> Mesh::listen(WorldLink& world, std::uint64_t nonce) {
  std::vector<std::string> addresses;
  LinkListener& listener = *this;
  const int wanted = options_.lanes > 0 ? options_.lanes : default_lanes();
  for (int number = 0; number < std::min(wanted, kMostLanes); ++number) {
    LinksPlan plan{.name = fmt::format("group.{:x}.{}", nonce, number),
                   .ranks = size(),
                   .rank = rank_,
                   .nonce = nonce,
                   .number = number};
    lanes_.push_back(std::make_unique<GroupLinks>(world, std::move(plan), listener));
    addresses.push_back(lanes_.back()->address());
  }
  return addresses;
}

/// Returns what went wrong on this rank; nullopt if it is connected to all others.
std::optional<Error> Mesh::connect(WorldLink& world, Deadline deadline) {
  Places mine{.nonce = GroupLinks::make_nonce(world)};
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
  for (const Bytes& theirs : options_.rounds.gather(world, mine.encode(), members_.ranks, deadline)) {
    places.push_back(Places::decode(theirs));
    count = std::min(count, places.back().addresses.size());
  }
  if (trouble) return trouble;
  lane_count_ = static_cast<int>(count);
  const Deadline limit = earlier(deadline, executor_.deadline_in(kDialLimit));
  const std::span lanes(lanes_.data(), count);
  for (const auto& lane : lanes) {
    for (int rank = 0; rank < rank_; ++rank) {
      const Places& its = places[static_cast<std::size_t>(rank)];
      try {
        lane->dial(rank, its.addresses[static_cast<std::size_t>(lane->number())], its.nonce, limit);
      } catch (const Error& error) {
        refuse(*lane, rank, error);
      }
    }
  }
  const auto all_connected = [&] {
    return std::all_of(lanes.begin(), lanes.end(), [&](const auto& lane) { return is_connected(*lane); });
  };
  while (!all_connected() && !is_refused() && !limit.passed(executor_.now())) {
    if (const auto ended = world.ended()) throw Error(*ended);
    connecting_->park(earlier(limit, executor_.deadline_in(kBetweenLooks)));
  }
  std::vector<std::string> missing;
  for (const auto& lane : lanes) {
    for (int rank = 0; rank < size(); ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      if (rank == rank_ || lane->has_met(rank)) continue;
      missing.push_back(fmt::format("{} at {}: {}", members_.names[place],
                                    places[place].addresses[static_cast<std::size_t>(lane->number())],
                                    why_missing(*lane, rank)));
    }
  }
  if (missing.empty()) return std::nullopt;
  return Error(ErrorKind::kDisconnected, fmt::format("has no connection to {}", fmt::join(missing, "; ")));
}

bool Mesh::is_connected(GroupLinks& lane) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && !lane.has_met(rank)) return false;
  }
  return true;
}

bool Mesh::is_refused() {
  MutexLock lock(mutex_);
  return !troubles_.empty();
}

std::string Mesh::why_missing(const GroupLinks& lane, int rank) {
  MutexLock lock(mutex_);
  const auto trouble = troubles_.find({lane.number(), rank});
  if (trouble != troubles_.end()) return trouble->second;
  if (rank > rank_) return fmt::format("it has not connected to {}", lane.address());
  return fmt::format(
      "the connection opened, but {} bytes did not pass in time: does the path drop large packets (MTU)?",
      kProbeBytes);
}

/// Throws on all ranks if one of them is not connected.
void Mesh::agree(WorldLink& world, std::optional<Error> mine, Deadline deadline) {
  const auto outcomes = gather_outcomes(
      [&](BytesView bytes) { return options_.rounds.gather(world, bytes, members_.ranks, deadline); },
      {.failure = std::move(mine)});
  std::vector<std::string> troubles;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const auto& failure = outcomes[rank].failure;
    if (!failure) continue;
    troubles.push_back(fmt::format("{} {}", members_.names[rank], failure->message()));
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
      send_over(*lanes_[0], rank, note, {});
    } catch (const Error&) {  // it has ended: nothing to announce
    }
  }
}

void Mesh::on_group_message(GroupLinks& lane, int rank, const GroupMessage& message,
                            std::vector<Buffer> segments) {
  if (const auto* part = std::get_if<Part>(&message)) {
    if (segments.size() != 1) throw_invalid("a part has one segment");
    inbox_.put({rank, part->operation, part->part}, part->calls, std::move(segments[0]));
  } else if (const auto* abort = std::get_if<Abort>(&message)) {
    inbox_.fail(Error(abort->kind, abort->text), abort->from_call);
  } else if (const auto* end = std::get_if<End>(&message)) {
    inbox_.end(rank, lane.number(), end->text);
  } else {
    throw_invalid("it belongs to another kind of connection");
  }
}

void Mesh::on_invalid(GroupLinks&, int rank, const Error& cause) {
  abort(Error(ErrorKind::kInvalid,
              fmt::format("{} sent an invalid message to the group: {}; do all ranks run the same "
                          "version of TorchSpan?",
                          members_.name(rank), cause.message())));
}

void Mesh::on_end(GroupLinks& lane, int rank, LinkEnd how, const Error& reason) {
  switch (how) {
    case LinkEnd::kNeverMet:
      return refuse(lane, rank, reason);
    case LinkEnd::kExpected:
      return inbox_.end(rank, lane.number(), "has closed its connection");
    case LinkEnd::kLost:
      return lost(rank, reason.message());
  }
}

void Mesh::refuse(const GroupLinks& lane, int rank, const Error& cause) {
  {
    MutexLock lock(mutex_);
    troubles_[{lane.number(), rank}] = cause.message();
  }
  connecting_->unpark();
}

/// On the lane's thread, which has nothing else to do for a group that breaks.
void Mesh::lost(int rank, const std::string& why) {
  if (inbox_.failure()) return;
  const auto place = static_cast<std::size_t>(rank);
  const std::string how = fmt::format("the connection to {} ended: {}", members_.names[place], why);
  abort(Error(ErrorKind::kDisconnected, fmt::format("{}; the group cannot continue without it",
                                                    world_->cause_of_loss(members_, {place, how}))));
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

void Mesh::wait_for_room(int to, GroupLinks& lane) {
  while (lane.unsent_bytes(to) > kMostUnsent) {
    inbox_.pause(kForRoom);
    if (!deadline_.passed(executor_.now())) continue;
    throw Error(ErrorKind::kTimedOut,
                fmt::format("{} does not take the data of this operation", members_.name(to)));
  }
}

void Mesh::send(int to, std::uint32_t part, BytesView data) {
  GroupLinks& lane = *lanes_[static_cast<std::size_t>(lane_of(part))];
  wait_for_room(to, lane);
  inbox_.throw_if_failed();
  const Segment segment{data.data(), data.size(), {}};
  send_over(lane, to, encode(Part{operation_, part, calls_.load(std::memory_order_relaxed)}),
            std::span(&segment, 1));
}

void Mesh::send_over(GroupLinks& lane, int to, BytesView header, std::span<const Segment> segments) {
  const std::string& peer = members_.name(to);
  const auto channel = lane.channel_to(to);
  if (!channel) {
    throw Error(ErrorKind::kDisconnected,
                fmt::format("{} has closed its connection, and the group cannot continue without it", peer));
  }
  try {
    channel->send(header, segments);
  } catch (const Error& error) {
    // The connection broke, and its end is not reported yet.
    throw Error(error.kind(), fmt::format("{} cannot be reached: {}", peer, error.message()));
  }
}

Buffer Mesh::take(int from, std::uint32_t part, std::size_t size) {
  Buffer data = inbox_.take({from, operation_, part}, lane_of(part), deadline_);
  if (data.size == size) return data;
  throw_invalid("{} sent {} bytes where {} were expected: do all ranks run the same version of TorchSpan?",
                members_.name(from), data.size, size);
}

}  // namespace torchspan::collective::channels
