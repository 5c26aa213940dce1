#include "rendezvous/store/store.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/api/saturated_time.h"
#include "rendezvous/api/environment.h"

namespace torchspan::rendezvous {
namespace {

/// Whether the last holder of `rank` said goodbye.
bool has_left(const Roster& roster, int rank) {
  const Roster::Worker* worker = roster.find(rank);
  return worker != nullptr && !worker->connection && !worker->died;
}

/// Why a connection ended, in terms of the worker and not of its socket.
std::string text_of(const Error& reason) {
  if (reason.kind() != ErrorKind::kDisconnected) return reason.message();
  if (reason.elapsed() > Duration::zero()) return silence_text(reason.elapsed());
  return "its process ended without a goodbye; see its own output for why";
}

}  // namespace

Store::Store(StoreOptions options, Connections connections)
    : options_(std::move(options)),
      connections_(std::move(connections)),
      rounds_([this](int rank, const SharedBytes& message) {
        Worker& worker = roster_.at(rank);
        if (!worker.connection) return;
        catch_up(worker);  // an error of a round names a worker whose end is known
        connections_.send(*worker.connection, message);
      }),
      heartbeats_(options_.heartbeats),
      announcements_(options_.announcements),
      phase_(is_open() ? Phase::kRunning : Phase::kGathering) {
  messages_.on<Register>([this](ConnectionId connection, TimePoint now,
                                Register message) { on_register(connection, std::move(message), now); },
                         [this](ByteReader& reader) { return Register::decode(reader, options_.versions); });
  messages_.on<Contribute>([this](ConnectionId connection, TimePoint now, Contribute message) {
    rounds_.contribute(rank_of(connection), std::move(message), now);
  });
  messages_.on<AskMissing>([this](ConnectionId connection, TimePoint, AskMissing message) {
    rounds_.report_missing(rank_of(connection), message.call);
  });
  messages_.on<Leave>([this](ConnectionId connection, TimePoint now, Leave) { on_leave(connection, now); });
  messages_.on<GiveUp>([this](ConnectionId connection, TimePoint now, GiveUp message) {
    on_give_up(connection, message.why, now);
  });
  messages_.on<Pong>([this](ConnectionId connection, TimePoint now, Pong message) {
    const auto rank = roster_.rank_of(connection);
    if (!options_.on_clock_sample || !rank) return;
    options_.on_clock_sample({*rank, message.sent, message.received, message.answered, now});
  });
}

void Store::on_message(ConnectionId connection, BytesView bytes, TimePoint now) {
  if (silent_.contains(connection)) return;
  heartbeats_.heard(connection);
  const auto rank = roster_.rank_of(connection);
  const bool newer = rank && roster_.at(*rank).registration.versions.newest > options_.versions.newest;
  messages_.dispatch(connection, now, bytes, newer ? Sender::kNewer : Sender::kKnown);
}

int Store::rank_of(ConnectionId connection) const {
  const auto rank = roster_.rank_of(connection);
  if (!rank || phase_ != Phase::kRunning) {
    throw_invalid("a client sent a message before it was admitted to the world");
  }
  return *rank;
}

void Store::on_register(ConnectionId connection, Register message, TimePoint now) {
  const bool waits =
      std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& one) { return one.first == connection; });
  if (roster_.rank_of(connection) || waits) throw_invalid("a client registered twice");
  if (const auto reason = rejection_reason(message)) {
    if (reason->kind() == ErrorKind::kUnsupported) rejection_ = reason->message();
    refuse(connection, *reason, /*passing=*/message.job != options_.job && has_left(roster_, 0));
    return;
  }
  if (message.member.host_id != options_.host_id) heartbeats_.watch(connection, now);
  if (phase_ != Phase::kRunning) {
    gather(connection, std::move(message), now);
  } else if (message.member.rank != 0 && !roster_.contains(0)) {
    waiting_.emplace_back(connection, std::move(message));
  } else {
    admit(connection, std::move(message));
    if (!roster_.contains(0)) return;
    for (auto& [other, early] : std::exchange(waiting_, {})) admit(other, std::move(early));
  }
}

void Store::gather(ConnectionId connection, Register message, TimePoint now) {
  const int rank = message.member.rank;
  if (phase_ == Phase::kFailed) {
    informed_.insert(rank);
    refuse(connection, *failure_);
    return;
  }
  if (const auto reason = reason_to_fail(message)) {
    informed_.insert(rank);
    refuse(connection, *reason);
    fail(*reason);
    return;
  }
  gather_until_ = earlier(gather_until_, deadline_after(now, message.timeout));
  message.member.incarnation = 0;
  roster_.enter(connection, std::move(message));
  if (static_cast<int>(roster_.all().size()) == options_.world_size) welcome_all();
}

void Store::admit(ConnectionId connection, Register message) {
  if (const auto reason = retry_reason(message)) {
    refuse(connection, *reason, /*passing=*/true);
    return;
  }
  if (const auto reason = admission_error(message)) {
    refuse(connection, *reason);
    return;
  }
  Member& member = message.member;
  member.rank = roster_.rank_for(member);
  const Worker* former = roster_.find(member.rank);
  member.incarnation = former == nullptr ? 0 : former->member().incarnation + 1;
  const Member copy = member;
  Worker& worker = roster_.enter(connection, std::move(message));
  rounds_.on_join(copy);
  worker.told = announcements_.end() + 1;  // its welcome says that it joined
  announce(Arrived{{copy}});
  connections_.send(connection, share_message(make_welcome()));
}

std::optional<Error> Store::rejection_reason(const Register& message) const {
  if (!common_protocol(message.versions, options_.versions)) {
    return Error(
        ErrorKind::kUnsupported,
        fmt::format("the worker that joins speaks {} of the store's protocol, rank 0 speaks {}: install "
                    "the same release of TorchSpan on all hosts, or two neighboring ones",
                    describe_versions(message.versions), describe_versions(options_.versions)));
  }
  if (message.job != options_.job) {
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the store at this address belongs to job '{}', {} belongs to job '{}': choose another "
                    "MASTER_PORT for one of them",
                    options_.job, describe(message.member), message.job));
  }
  if (!is_name(message.member.name)) {
    return Error(ErrorKind::kInvalid, fmt::format("rank {} has no valid name", message.member.rank));
  }
  const int size = message.world_size;
  if ((size == kOpenWorld) != is_open()) {
    const auto claim = [](int world_size) {
      return world_size == kOpenWorld ? "an open world (world_size 0)"
                                      : fmt::format("a fixed world of {} workers", world_size);
    };
    return Error(ErrorKind::kInvalid,
                 fmt::format("rank 0 serves {}, but {} was started for {}: give all workers of the job the "
                             "same world_size",
                             claim(options_.world_size), describe(message.member), claim(size)));
  }
  if (!is_open() && message.member.rank == kAnyRank) {
    return Error(ErrorKind::kInvalid,
                 fmt::format("'{}' names no rank; a fixed world of {} workers assigns none",
                             message.member.name, options_.world_size));
  }
  return std::nullopt;
}

std::optional<Error> Store::retry_reason(const Register& message) const {
  const int rank = message.member.rank;
  if (has_left(roster_, 0)) {
    return Error(ErrorKind::kDisconnected,
                 fmt::format("{} has left, and the world ends with it: {} can no longer join; start the job "
                             "again",
                             describe(roster_.at(0).member()), message.member.name));
  }
  // The members of a fixed world leave it together, so such a worker belongs to the next world.
  if (is_open() || !has_left(roster_, rank) || reason_in_a_complete_world(message)) return std::nullopt;
  return Error(ErrorKind::kDisconnected,
               fmt::format("{} has left, and this world is ending: {} can join the next one only",
                           describe(roster_.at(rank).member()), message.member.name));
}

std::optional<Error> Store::admission_error(const Register& message) const {
  const auto reason = is_open() ? reason_in_an_open_world(message) : reason_in_a_complete_world(message);
  if (reason) return reason;
  return roster_.difference_of_functions(message);
}

std::optional<Error> Store::reason_in_an_open_world(const Register& message) const {
  const Member& member = message.member;
  const auto refusal = [](std::string text) { return Error(ErrorKind::kInvalid, std::move(text)); };
  constexpr const char* kIfDead = "if that worker is dead, the store detects it soon: try again";
  const Worker* namesake = roster_.find(member.name);
  if (namesake != nullptr && namesake->connection) {
    return refusal(fmt::format("the name '{}' is taken by {}; choose another, or {}", member.name,
                               describe(namesake->member()), kIfDead));
  }
  if (namesake != nullptr && member.rank != kAnyRank && member.rank != namesake->member().rank) {
    return refusal(fmt::format(
        "'{}' requests rank {}, but that name belongs to rank {}, which {} held; join with that "
        "rank, with rank {}, or under another name",
        member.name, member.rank, namesake->member().rank, describe(namesake->member()), kAnyRank));
  }
  const Worker* same_rank = roster_.find(member.rank);
  if (same_rank != nullptr && same_rank->connection) {
    return refusal(fmt::format("rank {} is taken by {}; choose another or none (rank {}), or {}", member.rank,
                               describe(same_rank->member()), kAnyRank, kIfDead));
  }
  if (namesake == nullptr && member.rank == kAnyRank &&
      roster_.all().size() >= static_cast<std::size_t>(kMaxWorkers)) {
    return Error(ErrorKind::kOverloaded, fmt::format("all {} ranks of this world were used", kMaxWorkers));
  }
  return std::nullopt;
}

std::optional<Error> Store::reason_in_a_complete_world(const Register& message) const {
  const Worker* same = roster_.find(message.member.rank);
  const bool known = same != nullptr;
  if (known && !same->connection && same->member().name == message.member.name &&
      message.world_size == options_.world_size) {
    return std::nullopt;
  }
  return Error(
      ErrorKind::kInvalid,
      fmt::format("the world of {} workers is complete, so {} can no longer join{}; a worker that was "
                  "restarted takes its place again under the same rank, name and world size once its "
                  "predecessor is gone, and another job needs another MASTER_PORT",
                  options_.world_size, describe(message.member),
                  known ? fmt::format("; its rank is {}", describe(same->member())) : ""));
}

std::optional<Error> Store::reason_to_fail(const Register& message) const {
  const Member& member = message.member;
  if (message.world_size != options_.world_size || member.rank >= options_.world_size) {
    std::vector<const Member*> there;
    for (const auto& [rank, worker] : roster_.all()) there.push_back(&worker.member());
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the workers disagree about the size of the world: {} says WORLD_SIZE is {}, rank 0 "
                    "says {} (as do: {}); start all of them with the same WORLD_SIZE",
                    describe(member), message.world_size, options_.world_size, list_members(there)));
  }
  if (const Worker* same = roster_.find(member.rank)) {
    return Error(ErrorKind::kInvalid,
                 fmt::format("two workers have rank {}: {} and {}; give each its own RANK", member.rank,
                             describe(same->member()), describe(member)));
  }
  if (const Worker* other = roster_.find(member.name)) {
    return Error(
        ErrorKind::kInvalid,
        fmt::format("two workers are named '{}': {} and {}; give each its own TORCHSPAN_NAME, or none",
                    member.name, describe(other->member()), describe(member)));
  }
  return roster_.difference_of_functions(message);
}

void Store::refuse(ConnectionId connection, const Error& reason, bool passing) {
  heartbeats_.forget(connection);
  refused_.insert(connection);
  connections_.send(connection, share_message(Refused{reason.kind(), reason.message(), passing}));
}

void Store::fail(const Error& reason) {
  phase_ = Phase::kFailed;
  failure_ = reason;
  for (auto& [rank, worker] : roster_.all()) {
    if (!worker.connection) continue;
    informed_.insert(rank);
    refuse(*worker.connection, reason);
  }
}

Welcome Store::make_welcome() const {
  Welcome welcome;
  welcome.versions = options_.versions;
  for (const auto& [rank, worker] : roster_.all()) {
    welcome.members.push_back(worker.member());
    if (worker.connection) continue;
    if (!welcome.departed.empty() && welcome.departed.back().died == worker.died &&
        welcome.departed.back().how == worker.how) {
      welcome.departed.back().ranks.push_back(rank);
    } else {
      welcome.departed.push_back({{rank}, worker.died, worker.how});
    }
  }
  return welcome;
}

void Store::welcome_all() {
  phase_ = Phase::kRunning;
  const SharedBytes message = share_message(make_welcome());
  for (const auto& [rank, worker] : roster_.all()) {
    rounds_.on_join(worker.member());
    connections_.send(*worker.connection, message);
  }
}

void Store::announce(Changes::Change change) {
  announcements_.add(std::move(change));
  if (!announcements_.batches()) catch_up_all(TimePoint{});
}

void Store::catch_up(Worker& worker) {
  if (const SharedBytes changes = announcements_.take_since(worker.told)) {
    connections_.send(*worker.connection, changes);
  }
}

void Store::catch_up_all(TimePoint now) {
  // Rank 0 last: a death may end its process, and the store with it.
  for (auto worker = roster_.all().rbegin(); worker != roster_.all().rend(); ++worker) {
    if (worker->second.connection) catch_up(worker->second);
  }
  announcements_.all_sent(now, roster_.present());
}

void Store::on_leave(ConnectionId connection, TimePoint now) {
  const int rank = rank_of(connection);
  connections_.send(connection, share_message(Farewell{}));
  Worker& worker = roster_.at(rank);
  heartbeats_.forget(*worker.connection);
  roster_.leave(worker);
  announce(Departed{{rank}});
  rounds_.on_departed(rank, describe(worker.member()) + " left the world" + first_death_.before(now));
}

void Store::on_give_up(ConnectionId connection, const std::string& why, TimePoint now) {
  const int rank = rank_of(connection);
  end_of(rank, " " + why, now);
  if (rank == 0) catch_up_all(now);  // the store ends with it
  connections_.send(connection, share_message(Farewell{}));
}

void Store::on_closed(ConnectionId connection, const Error& reason, TimePoint now) {
  refused_.erase(connection);
  silent_.erase(connection);
  heartbeats_.forget(connection);
  report_end(connection, text_of(reason), now);
}

void Store::report_end(ConnectionId connection, const std::string& cause, TimePoint now) {
  std::erase_if(waiting_, [&](const auto& one) { return one.first == connection; });
  const auto found = phase_ == Phase::kFailed ? std::nullopt : roster_.rank_of(connection);
  if (!found) return;
  const int rank = *found;
  if (phase_ == Phase::kRunning) return end_of(rank, " died: " + cause, now);
  Worker& worker = roster_.at(rank);
  heartbeats_.forget(*worker.connection);
  roster_.leave(worker);
  informed_.insert(rank);
  fail(Error(ErrorKind::kDisconnected,
             fmt::format("{} died while the world was gathering: {}", describe(worker.member()), cause)));
}

void Store::end_of(int rank, const std::string& how, TimePoint now) {
  Worker& worker = roster_.at(rank);
  heartbeats_.forget(*worker.connection);
  roster_.leave(worker);
  worker.died = true;
  worker.how = how;
  announce(Departed{{rank}, true, how});
  rounds_.on_departed(rank, describe(worker.member()) + how + first_death_.before(now));
  first_death_.add(worker.member(), now);
}

Error Store::missing_workers() const {
  std::vector<const Member*> there;
  for (const auto& [rank, worker] : roster_.all()) there.push_back(&worker.member());
  return Error(
      ErrorKind::kTimedOut,
      fmt::format("only {} of {} workers joined before the join timeout; missing: rank {}; there: {}; "
                  "start the missing ones (their own output may say why they did not join), or set "
                  "WORLD_SIZE to the number you want{}",
                  there.size(), options_.world_size, list_some(missing()), list_members(there),
                  rejection_.empty() ? "" : "; a worker was refused meanwhile: " + rejection_));
}

void Store::tick(TimePoint now) {
  if (phase_ == Phase::kGathering && gather_until_.passed(now)) {
    // Missing ranks cannot get the reason, so the store does not wait for them.
    for (int rank = 0; rank < options_.world_size; ++rank) informed_.insert(rank);
    fail(missing_workers());
  }
  rounds_.tick(now);
  const Heartbeats::Due due = heartbeats_.tick(now);
  const Duration dead_after = heartbeats_.options().dead_after;
  for (const ConnectionId connection : due.ask)
    connections_.send(connection, share_message(Ping{dead_after, now}));
  for (const ConnectionId connection : due.dead) {
    const std::string cause = silence_text(dead_after);
    silent_.insert(connection);
    connections_.send(connection, share_message(DeclaredDead{cause}));
    connections_.close(connection);
    report_end(connection, cause, now);
  }
  if (announcements_.due(now)) catch_up_all(now);
}

Deadline Store::next_deadline() const {
  const Deadline next = phase_ == Phase::kGathering ? gather_until_ : rounds_.next_deadline();
  return earlier(next, earlier(heartbeats_.next_deadline(), announcements_.next_deadline()));
}

bool Store::is_finished() const {
  if (phase_ == Phase::kFailed) {
    return refused_.empty() && static_cast<int>(informed_.size()) >= options_.world_size;
  }
  return roster_.present() == 0;
}

std::vector<int> Store::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; phase_ == Phase::kGathering && rank < options_.world_size; ++rank) {
    if (!roster_.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<const Member*> Store::present() const {
  std::vector<const Member*> members;
  for (const auto& [rank, worker] : roster_.all()) {
    if (worker.connection) members.push_back(&worker.member());
  }
  return members;
}

}  // namespace torchspan::rendezvous
