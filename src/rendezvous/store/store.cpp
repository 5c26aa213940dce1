#include "rendezvous/store/store.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "rendezvous/messages/names.h"

namespace torchspan::rendezvous {
namespace {

/// Whether the last holder of `rank` said goodbye.
template <class Workers>
bool has_left(const Workers& workers, int rank) {
  const auto found = workers.find(rank);
  return found != workers.end() && !found->second.connection && !found->second.died;
}

/// The entries that only `left` has, shortened.
std::string only_in(const Register& left, const Register& right) {
  constexpr std::size_t kMost = 8;
  const std::set<std::string> others(right.functions.begin(), right.functions.end());
  std::vector<std::string> extra;
  for (const auto& name : std::set<std::string>(left.functions.begin(), left.functions.end())) {
    if (!others.contains(name)) extra.push_back(name);
  }
  if (extra.empty()) return "";
  const std::size_t more = extra.size() > kMost ? extra.size() - kMost : 0;
  extra.resize(extra.size() - more);
  return fmt::format("; only {} has {}{}", describe(left.member), fmt::join(extra, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
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
      rounds_([this](int rank, Bytes message) {
        if (const auto& connection = workers_.at(rank).connection) {
          connections_.send(*connection, std::move(message));
        }
      }),
      heartbeats_(options_.heartbeats),
      phase_(is_open() ? Phase::kRunning : Phase::kGathering) {
  messages_.on<Register>([this](ConnectionId connection, TimePoint now, Register message) {
    on_register(connection, std::move(message), now);
  });
  messages_.on<Contribute>([this](ConnectionId connection, TimePoint now, Contribute message) {
    rounds_.contribute(rank_of(connection), std::move(message), now);
  });
  messages_.on<AskMissing>([this](ConnectionId connection, TimePoint, AskMissing message) {
    rounds_.report_missing(rank_of(connection), message.call);
  });
  messages_.on<Leave>([this](ConnectionId connection, TimePoint, Leave) { on_leave(connection); });
  messages_.on<GiveUp>(
      [this](ConnectionId connection, TimePoint, GiveUp message) { on_give_up(connection, message.why); });
  messages_.on<Pong>([this](ConnectionId connection, TimePoint now, Pong message) {
    const auto found = ranks_.find(connection);
    if (!options_.on_clock_sample || found == ranks_.end()) return;
    options_.on_clock_sample({found->second, message.sent, message.received, message.answered, now});
  });
}

void Store::on_message(ConnectionId connection, BytesView bytes, TimePoint now) {
  if (silent_.contains(connection)) return;
  heartbeats_.heard(connection);
  messages_.dispatch(connection, now, bytes);
}

int Store::rank_of(ConnectionId connection) const {
  const auto found = ranks_.find(connection);
  if (found == ranks_.end() || phase_ != Phase::kRunning) {
    throw Error(ErrorKind::kInvalid, "a client sent a message before it was admitted to the world");
  }
  return found->second;
}

void Store::on_register(ConnectionId connection, Register message, TimePoint now) {
  const bool waits =
      std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& one) { return one.first == connection; });
  if (ranks_.contains(connection) || waits) throw Error(ErrorKind::kInvalid, "a client registered twice");
  if (const auto reason = rejection_reason(message)) {
    refuse(connection, *reason, /*passing=*/message.job != options_.job && has_left(workers_, 0));
    return;
  }
  if (message.member.host_id != options_.host_id) heartbeats_.watch(connection, now);
  if (phase_ != Phase::kRunning) {
    gather(connection, std::move(message), now);
  } else if (message.member.rank != 0 && !workers_.contains(0)) {
    waiting_.emplace_back(connection, std::move(message));
  } else {
    admit(connection, std::move(message));
    if (!workers_.contains(0)) return;
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
  ranks_[connection] = rank;
  workers_[rank] = {std::move(message), connection};
  if (static_cast<int>(workers_.size()) == options_.world_size) welcome_all();
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
  member.rank = rank_for(member);
  const auto former = workers_.find(member.rank);
  member.incarnation = former == workers_.end() ? 0 : former->second.member().incarnation + 1;
  const Member copy = member;
  ranks_[connection] = copy.rank;
  workers_[copy.rank] = {std::move(message), connection};
  rounds_.on_join(copy);
  notify_others(copy.rank, Joined{copy});
  connections_.send(connection, encode_message(make_welcome()));
}

const Store::Worker* Store::holder_of(const std::string& name) const {
  const auto found = std::find_if(workers_.begin(), workers_.end(),
                                  [&](const auto& one) { return one.second.member().name == name; });
  return found == workers_.end() ? nullptr : &found->second;
}

int Store::rank_for(const Member& member) const {
  if (member.rank != kAnyRank) return member.rank;
  if (const Worker* former = holder_of(member.name)) return former->member().rank;
  int rank = 1;
  while (workers_.contains(rank)) ++rank;
  return rank;
}

std::optional<Error> Store::rejection_reason(const Register& message) const {
  if (message.version != kStoreVersion) {
    return Error(
        ErrorKind::kUnsupported,
        fmt::format("this worker speaks version {} of the store's protocol, rank 0 speaks version {}: build "
                    "all workers from one version of TorchSpan",
                    message.version, kStoreVersion));
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
  if (has_left(workers_, 0)) {
    return Error(ErrorKind::kDisconnected,
                 fmt::format("{} has left, and the world ends with it: {} can no longer join; start the job "
                             "again",
                             describe(workers_.at(0).member()), message.member.name));
  }
  // The members of a fixed world leave it together, so such a worker belongs to the next world.
  if (is_open() || !has_left(workers_, rank) || reason_in_a_complete_world(message)) return std::nullopt;
  return Error(ErrorKind::kDisconnected,
               fmt::format("{} has left, and this world is ending: {} can join the next one only",
                           describe(workers_.at(rank).member()), message.member.name));
}

std::optional<Error> Store::admission_error(const Register& message) const {
  const auto reason = is_open() ? reason_in_an_open_world(message) : reason_in_a_complete_world(message);
  return reason ? reason : difference_of_functions(message);
}

std::optional<Error> Store::reason_in_an_open_world(const Register& message) const {
  const Member& member = message.member;
  const auto refusal = [](std::string text) { return Error(ErrorKind::kInvalid, std::move(text)); };
  constexpr const char* kIfDead = "if that worker is dead, the store detects it soon: try again";
  const Worker* namesake = holder_of(member.name);
  if (namesake != nullptr && namesake->connection) {
    return refusal(fmt::format("the name '{}' is taken by {}; choose another, or {}", member.name,
                               describe(namesake->member()), kIfDead));
  }
  if (namesake != nullptr && member.rank != kAnyRank && member.rank != namesake->member().rank) {
    return refusal(fmt::format(
        "'{}' wants rank {}, but that name belongs to rank {}, which {} held; join with that "
        "rank, with rank {}, or under another name",
        member.name, member.rank, namesake->member().rank, describe(namesake->member()), kAnyRank));
  }
  const auto same_rank = workers_.find(member.rank);
  if (same_rank != workers_.end() && same_rank->second.connection) {
    return refusal(fmt::format("rank {} is taken by {}; choose another or none (rank {}), or {}", member.rank,
                               describe(same_rank->second.member()), kAnyRank, kIfDead));
  }
  if (namesake == nullptr && member.rank == kAnyRank &&
      workers_.size() >= static_cast<std::size_t>(kMaxWorkers)) {
    return Error(ErrorKind::kOverloaded, fmt::format("all {} ranks of this world were used", kMaxWorkers));
  }
  return std::nullopt;
}

std::optional<Error> Store::reason_in_a_complete_world(const Register& message) const {
  const auto same = workers_.find(message.member.rank);
  const bool known = same != workers_.end();
  if (known && !same->second.connection && same->second.member().name == message.member.name &&
      message.world_size == options_.world_size) {
    return std::nullopt;
  }
  return Error(
      ErrorKind::kInvalid,
      fmt::format("the world of {} workers is complete, so {} can no longer join{}; a worker that was "
                  "restarted takes its place again under the same rank, name and world size once its "
                  "predecessor is gone, and another job needs another MASTER_PORT",
                  options_.world_size, describe(message.member),
                  known ? fmt::format("; its rank is {}", describe(same->second.member())) : ""));
}

std::optional<Error> Store::difference_of_functions(const Register& message) const {
  for (const auto& [rank, worker] : workers_) {
    const Register& other = worker.registration;
    if (!worker.connection || other.member.functions_digest == message.member.functions_digest ||
        (!other.require_same_functions && !message.require_same_functions)) {
      continue;
    }
    return Error(ErrorKind::kInvalid,
                 fmt::format("the workers' function tables differ{}{}; start the same program everywhere, or "
                             "allow the difference with require_same_functions = false",
                             only_in(other, message), only_in(message, other)));
  }
  return std::nullopt;
}

std::optional<Error> Store::reason_to_fail(const Register& message) const {
  const Member& member = message.member;
  std::vector<const Member*> there;
  for (const auto& [rank, worker] : workers_) there.push_back(&worker.member());
  if (message.world_size != options_.world_size || member.rank >= options_.world_size) {
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the workers disagree about the size of the world: {} says WORLD_SIZE is {}, rank 0 "
                    "says {} (as do: {}); start all of them with the same WORLD_SIZE",
                    describe(member), message.world_size, options_.world_size, list_members(there)));
  }
  if (const auto same = workers_.find(member.rank); same != workers_.end()) {
    return Error(ErrorKind::kInvalid,
                 fmt::format("two workers have rank {}: {} and {}; give each its own RANK", member.rank,
                             describe(same->second.member()), describe(member)));
  }
  if (const Worker* other = holder_of(member.name)) {
    return Error(
        ErrorKind::kInvalid,
        fmt::format("two workers are named '{}': {} and {}; give each its own TORCHSPAN_NAME, or none",
                    member.name, describe(other->member()), describe(member)));
  }
  return difference_of_functions(message);
}

void Store::refuse(ConnectionId connection, const Error& reason, bool passing) {
  heartbeats_.forget(connection);
  refused_.insert(connection);
  connections_.send(connection, encode_message(Refused{reason.kind(), reason.message(), passing}));
}

void Store::fail(const Error& reason) {
  phase_ = Phase::kFailed;
  failure_ = reason;
  for (auto& [rank, worker] : workers_) {
    if (!worker.connection) continue;
    informed_.insert(rank);
    refuse(*worker.connection, reason);
  }
  ranks_.clear();
}

Welcome Store::make_welcome() const {
  Welcome welcome;
  for (const auto& [rank, worker] : workers_) {
    welcome.members.push_back(worker.member());
    if (!worker.connection) welcome.gone.push_back({rank, worker.died, worker.cause});
  }
  return welcome;
}

void Store::welcome_all() {
  phase_ = Phase::kRunning;
  const Bytes message = encode_message(make_welcome());
  for (const auto& [rank, worker] : workers_) {
    rounds_.on_join(worker.member());
    connections_.send(*worker.connection, message);
  }
}

template <class Message>
void Store::notify_others(int rank, const Message& message) {
  const Bytes bytes = encode_message(message);
  for (const auto& [other, worker] : workers_) {
    if (other != rank && worker.connection) connections_.send(*worker.connection, bytes);
  }
}

void Store::on_leave(ConnectionId connection) {
  const int rank = rank_of(connection);
  connections_.send(connection, encode_message(Farewell{}));
  Worker& worker = workers_.at(rank);
  worker.connection.reset();
  ranks_.erase(connection);
  heartbeats_.forget(connection);
  notify_others(rank, Left{rank});
  rounds_.on_gone(rank, describe(worker.member()) + " left the world");
}

void Store::on_give_up(ConnectionId connection, const std::string& why) {
  const int rank = rank_of(connection);
  end_of(rank, fmt::format("{} {}", describe(workers_.at(rank).member()), why));
  connections_.send(connection, encode_message(Farewell{}));
}

void Store::on_closed(ConnectionId connection, const Error& reason) {
  refused_.erase(connection);
  silent_.erase(connection);
  heartbeats_.forget(connection);
  report_end(connection, text_of(reason));
}

void Store::report_end(ConnectionId connection, const std::string& cause) {
  std::erase_if(waiting_, [&](const auto& one) { return one.first == connection; });
  const auto found = ranks_.find(connection);
  if (found == ranks_.end()) return;
  const int rank = found->second;
  const std::string name = describe(workers_.at(rank).member());
  if (phase_ == Phase::kRunning) return end_of(rank, fmt::format("{} died: {}", name, cause));
  ranks_.erase(found);
  workers_.at(rank).connection.reset();
  informed_.insert(rank);
  fail(
      Error(ErrorKind::kDisconnected, fmt::format("{} died while the world was gathering: {}", name, cause)));
}

void Store::end_of(int rank, const std::string& cause) {
  Worker& worker = workers_.at(rank);
  ranks_.erase(*worker.connection);
  heartbeats_.forget(*worker.connection);
  worker.connection.reset();
  worker.died = true;
  worker.cause = cause;
  notify_others(rank, Died{rank, cause});
  rounds_.on_gone(rank, cause);
}

Error Store::missing_workers() const {
  std::vector<std::string> missing;
  std::vector<const Member*> there;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const auto found = workers_.find(rank);
    if (found != workers_.end()) {
      there.push_back(&found->second.member());
    } else if (missing.size() < 16) {
      missing.push_back(std::to_string(rank));
    } else {
      missing.back() = "…";
    }
  }
  return Error(
      ErrorKind::kTimedOut,
      fmt::format("only {} of {} workers joined before the join timeout; missing: rank {}; there: {}; "
                  "start the missing ones (their own output may say why they did not join), or set "
                  "WORLD_SIZE to the number you want",
                  there.size(), options_.world_size, fmt::join(missing, ", "), list_members(there)));
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
    connections_.send(connection, encode_message(Ping{dead_after, now}));
  for (const ConnectionId connection : due.dead) {
    const std::string cause = silence_text(dead_after);
    silent_.insert(connection);
    connections_.send(connection, encode_message(DeclaredDead{cause}));
    connections_.close(connection);
    report_end(connection, cause);
  }
}

Deadline Store::next_deadline() const {
  const Deadline next = phase_ == Phase::kGathering ? gather_until_ : rounds_.next_deadline();
  return earlier(next, heartbeats_.next_deadline());
}

bool Store::is_finished() const {
  if (phase_ == Phase::kFailed) {
    return refused_.empty() && static_cast<int>(informed_.size()) >= options_.world_size;
  }
  return ranks_.empty();
}

std::vector<const Member*> Store::present() const {
  std::vector<const Member*> members;
  for (const auto& [rank, worker] : workers_) {
    if (worker.connection) members.push_back(&worker.member());
  }
  return members;
}

}  // namespace torchspan::rendezvous
