#include "rendezvous/store.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "rendezvous/names.h"

namespace torchspan::rendezvous {
namespace {

/// What `left` has and `right` has not, shortened.
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
std::string story_of(const Error& reason) {
  if (reason.kind() != ErrorKind::kDisconnected) return reason.message();
  return "its process ended without a good-bye; see its own output for why";
}

}  // namespace

Store::Store(StoreOptions options, Send send)
    : options_(std::move(options)), send_(std::move(send)), rounds_([this](int rank, Bytes message) {
        if (const auto& connection = workers_.at(rank).connection) send_(*connection, std::move(message));
      }) {
  messages_.on<Register>([this](ConnectionId connection, TimePoint now, Register message) {
    on_register(connection, std::move(message), now);
  });
  messages_.on<Contribute>([this](ConnectionId connection, TimePoint now, Contribute message) {
    rounds_.contribute(rank_of(connection), std::move(message), now);
  });
  messages_.on<Leave>([this](ConnectionId connection, TimePoint, Leave) { on_leave(connection); });
}

void Store::on_message(ConnectionId connection, BytesView bytes, TimePoint now) {
  messages_.dispatch(connection, now, bytes);
}

int Store::rank_of(ConnectionId connection) const {
  const auto found = ranks_.find(connection);
  if (found == ranks_.end() || phase_ != Phase::kComplete) {
    throw Error(ErrorKind::kInvalid, "a client spoke before it was welcome in the world");
  }
  return found->second;
}

void Store::on_register(ConnectionId connection, Register message, TimePoint now) {
  if (ranks_.contains(connection)) throw Error(ErrorKind::kInvalid, "a client registered twice");
  if (const auto reason = reason_to_turn_away(message)) {
    refuse(connection, *reason);
    return;
  }
  if (phase_ == Phase::kFailed) {
    told_.insert(message.member.rank);
    refuse(connection, *failure_);
    return;
  }
  if (const auto reason = reason_to_fail(message)) {
    told_.insert(message.member.rank);
    refuse(connection, *reason);
    fail(*reason);
    return;
  }
  gather_until_ = earlier(gather_until_, deadline_after(now, message.timeout));
  const int rank = message.member.rank;
  ranks_[connection] = rank;
  workers_[rank] = {std::move(message), connection};
  if (static_cast<int>(workers_.size()) == options_.world_size) welcome_everybody();
}

std::optional<Error> Store::reason_to_turn_away(const Register& message) const {
  if (message.version != kStoreVersion) {
    return Error(
        ErrorKind::kUnsupported,
        fmt::format("{} speaks version {} of the store's protocol, rank 0 speaks version {}: build all "
                    "workers from one version of TorchSpan",
                    describe(message.member), message.version, kStoreVersion));
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
  if (phase_ == Phase::kComplete) {
    const auto same = workers_.find(message.member.rank);
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the world of {} workers is complete, so {} cannot join any more{}; a worker that was "
                    "restarted needs the whole job to start again, and another job needs another "
                    "MASTER_PORT",
                    options_.world_size, describe(message.member),
                    same == workers_.end()
                        ? ""
                        : fmt::format("; its rank is {}", describe(same->second.registration.member))));
  }
  return std::nullopt;
}

std::optional<Error> Store::reason_to_fail(const Register& message) const {
  const Member& member = message.member;
  std::vector<const Member*> there;
  for (const auto& [rank, worker] : workers_) there.push_back(&worker.registration.member);
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
                             describe(same->second.registration.member), describe(member)));
  }
  for (const auto& [rank, worker] : workers_) {
    const Register& other = worker.registration;
    if (other.member.name == member.name) {
      return Error(
          ErrorKind::kInvalid,
          fmt::format("two workers are named '{}': {} and {}; give each its own TORCHSPAN_NAME, or none",
                      member.name, describe(other.member), describe(member)));
    }
    if (other.member.functions_digest != member.functions_digest &&
        (other.require_same_functions || message.require_same_functions)) {
      return Error(
          ErrorKind::kInvalid,
          fmt::format("the workers' function tables differ{}{}; start the same program everywhere, or allow "
                      "the difference with require_same_functions = false",
                      only_in(other, message), only_in(message, other)));
    }
  }
  return std::nullopt;
}

void Store::refuse(ConnectionId connection, const Error& reason) {
  refused_.insert(connection);
  send_(connection, encode_message(Refused{reason.kind(), reason.message()}));
}

void Store::fail(const Error& reason) {
  phase_ = Phase::kFailed;
  failure_ = reason;
  for (auto& [rank, worker] : workers_) {
    if (!worker.connection) continue;
    told_.insert(rank);
    refuse(*worker.connection, reason);
  }
  ranks_.clear();
}

void Store::welcome_everybody() {
  phase_ = Phase::kComplete;
  Welcome welcome;
  for (const auto& [rank, worker] : workers_) welcome.members.push_back(worker.registration.member);
  const Bytes message = encode_message(welcome);
  rounds_.set_members(std::move(welcome.members));
  for (const auto& [rank, worker] : workers_) send_(*worker.connection, message);
}

template <class Message>
void Store::tell_others(int rank, const Message& message) {
  const Bytes bytes = encode_message(message);
  for (const auto& [other, worker] : workers_) {
    if (other != rank && worker.connection) send_(*worker.connection, bytes);
  }
}

void Store::on_leave(ConnectionId connection) {
  const int rank = rank_of(connection);
  send_(connection, encode_message(Farewell{}));
  Worker& worker = workers_.at(rank);
  worker.connection.reset();
  ranks_.erase(connection);
  tell_others(rank, Left{rank});
  rounds_.on_gone(rank, describe(worker.registration.member) + " left the world");
}

void Store::on_closed(ConnectionId connection, const Error& reason) {
  refused_.erase(connection);
  const auto found = ranks_.find(connection);
  if (found == ranks_.end()) return;
  const int rank = found->second;
  ranks_.erase(found);
  Worker& worker = workers_.at(rank);
  worker.connection.reset();
  const std::string name = describe(worker.registration.member);
  if (phase_ == Phase::kGathering) {
    told_.insert(rank);
    fail(Error(ErrorKind::kDisconnected,
               fmt::format("{} died while the world was gathering: {}", name, story_of(reason))));
    return;
  }
  tell_others(rank, Died{rank, story_of(reason)});
  rounds_.on_gone(rank, fmt::format("{} died: {}", name, story_of(reason)));
}

Error Store::missing_workers() const {
  std::vector<std::string> missing;
  std::vector<const Member*> there;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const auto found = workers_.find(rank);
    if (found != workers_.end()) {
      there.push_back(&found->second.registration.member);
    } else if (missing.size() < 16) {
      missing.push_back(std::to_string(rank));
    } else {
      missing.back() = "…";
    }
  }
  return Error(
      ErrorKind::kTimedOut,
      fmt::format("only {} of {} workers came before the time to join ended; missing: rank {}; there: {}; "
                  "start the missing ones (their own output may say why they did not come), or set "
                  "WORLD_SIZE to the number you want",
                  there.size(), options_.world_size, fmt::join(missing, ", "), list_members(there)));
}

void Store::tick(TimePoint now) {
  if (phase_ == Phase::kGathering && gather_until_.passed(now)) {
    for (int rank = 0; rank < options_.world_size; ++rank) told_.insert(rank);  // the missing cannot be told
    fail(missing_workers());
  }
  rounds_.tick(now);
}

Deadline Store::next_deadline() const {
  return phase_ == Phase::kGathering ? gather_until_ : rounds_.next_deadline();
}

bool Store::deserted() const {
  if (phase_ == Phase::kFailed) {
    return refused_.empty() && static_cast<int>(told_.size()) >= options_.world_size;
  }
  return ranks_.empty();
}

std::vector<const Member*> Store::present() const {
  std::vector<const Member*> members;
  for (const auto& [rank, worker] : workers_) {
    if (worker.connection) members.push_back(&worker.registration.member);
  }
  return members;
}

}  // namespace torchspan::rendezvous
