#include "rendezvous/store/roster.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <utility>

#include "core/api/saturated_time.h"

namespace torchspan::rendezvous {

std::string silence_text(Duration silence) {
  return fmt::format(
      "silent for {:.1f} s (no heartbeat); its process is stopped, or its host or the network is down",
      to_seconds(silence));
}

void Heartbeats::watch(std::uint64_t connection, TimePoint now) {
  forget(connection);
  peers_[connection] = {now, std::nullopt};
  to_ask_.emplace(now, connection);
}

void Heartbeats::forget(std::uint64_t connection) {
  const auto found = peers_.find(connection);
  if (found == peers_.end()) return;
  to_ask_.erase({found->second.ask_at, connection});
  if (found->second.asked_since) unanswered_.erase({*found->second.asked_since, connection});
  peers_.erase(found);
}

void Heartbeats::heard(std::uint64_t connection) {
  const auto found = peers_.find(connection);
  if (found == peers_.end() || !found->second.asked_since) return;
  unanswered_.erase({*found->second.asked_since, connection});
  found->second.asked_since.reset();
}

Heartbeats::Due Heartbeats::tick(TimePoint now) {
  Due due;
  while (!unanswered_.empty() && now - unanswered_.begin()->first >= options_.dead_after) {
    due.dead.push_back(unanswered_.begin()->second);
    forget(due.dead.back());
  }
  while (!to_ask_.empty() && to_ask_.begin()->first <= now) {
    const std::uint64_t connection = to_ask_.begin()->second;
    to_ask_.erase(to_ask_.begin());
    due.ask.push_back(connection);
    Peer& peer = peers_.at(connection);
    peer.ask_at = now + options_.interval;
    to_ask_.emplace(peer.ask_at, connection);
    if (peer.asked_since) continue;
    peer.asked_since = now;
    unanswered_.emplace(now, connection);
  }
  return due;
}

Deadline Heartbeats::next_deadline() const {
  Deadline next;
  if (!to_ask_.empty()) next = Deadline(to_ask_.begin()->first);
  if (!unanswered_.empty())
    next = earlier(next, deadline_after(unanswered_.begin()->first, options_.dead_after));
  return next;
}

void Announcements::add(Changes::Change change) {
  log_.push_back(std::move(change));
  waiting_ = true;
}

SharedBytes Announcements::take_since(std::uint64_t& place) {
  if (place >= end()) return nullptr;
  if (!encoded_ || encoded_from_ != place || encoded_to_ != end()) {
    Changes changes;
    for (std::uint64_t at = std::max(place, begin_); at < end(); ++at) {
      changes.add(log_[static_cast<std::size_t>(at - begin_)]);
    }
    encoded_ = std::make_shared<const Bytes>(encode_message(changes));
    encoded_from_ = place;
    encoded_to_ = end();
  }
  place = end();
  return encoded_;
}

void Announcements::all_sent(TimePoint now, std::size_t workers) {
  begin_ = end();
  log_.clear();
  encoded_.reset();
  waiting_ = false;
  const auto count = static_cast<std::int64_t>(workers);
  const Duration pause = count > options_.most / std::max(options_.per_worker, Duration(1))
                             ? options_.most
                             : options_.per_worker * count;
  not_before_ = now + pause;
}

namespace {

/// The entries that only `left` has, shortened.
std::string only_in(const std::string& holder, const std::vector<std::string>& left,
                    const std::vector<std::string>& right) {
  constexpr std::size_t kMost = 8;
  const std::set<std::string> others(right.begin(), right.end());
  std::vector<std::string> extra;
  for (const auto& name : std::set<std::string>(left.begin(), left.end())) {
    if (!others.contains(name)) extra.push_back(name);
  }
  if (extra.empty()) return "";
  const std::size_t more = extra.size() > kMost ? extra.size() - kMost : 0;
  extra.resize(extra.size() - more);
  return fmt::format("; only {} has {}{}", holder, fmt::join(extra, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
}

/// A function that both have with different signatures. An entry is the name, a space and the signature.
std::optional<Error> changed_signature(const std::string& holder, const std::vector<std::string>& present,
                                       const Register& message) {
  const auto name_of = [](const std::string& entry) { return entry.substr(0, entry.find(' ')); };
  std::map<std::string, std::string> entries;
  for (const std::string& entry : present) entries.emplace(name_of(entry), entry);
  for (const std::string& entry : message.functions) {
    const auto same = entries.find(name_of(entry));
    if (same == entries.end() || same->second == entry) continue;
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the workers' functions named '{}' differ: {} has '{}', {} has '{}'; give the new "
                    "signature a new name, and keep the old function until all workers are updated",
                    same->first, holder, same->second, describe(message.member), entry));
  }
  return std::nullopt;
}

}  // namespace

FunctionTables::Key FunctionTables::key_of(const Member& member) {
  return {member.functions_digest, member.wire.oldest, member.wire.newest, member.wire.features};
}

void FunctionTables::add(const Register& registration) {
  Table& table = tables_[key_of(registration.member)];
  if (table.holders.empty()) {
    table.functions = registration.functions;
    table.wire = registration.member.wire;
  }
  const bool fresh = table.holders.insert(registration.member.rank).second;
  if (fresh && registration.require_same_functions) ++table.require_same;
}

void FunctionTables::remove(const Register& registration) {
  const auto found = tables_.find(key_of(registration.member));
  if (found == tables_.end() || found->second.holders.erase(registration.member.rank) == 0) return;
  if (registration.require_same_functions) --found->second.require_same;
  if (found->second.holders.empty()) tables_.erase(found);
}

std::optional<Error> FunctionTables::difference(const Register& message,
                                                const std::function<std::string(int rank)>& describe) const {
  for (const auto& [key, table] : tables_) {
    const std::string holder = describe(*table.holders.begin());
    if (!common_protocol(table.wire, message.member.wire)) {
      return Error(ErrorKind::kUnsupported,
                   fmt::format("{} speaks {} of the wire format, {} speaks {}: install the same release of "
                               "TorchSpan on all hosts, or two neighboring ones",
                               holder, describe_versions(table.wire), rendezvous::describe(message.member),
                               describe_versions(message.member.wire)));
    }
    if (std::get<0>(key) == message.member.functions_digest) continue;
    if (!message.require_same_functions && table.require_same == 0) {
      if (auto changed = changed_signature(holder, table.functions, message)) return changed;
      continue;
    }
    // A third worker, which is rejected too, must not take itself for one of the two.
    const std::string other = rendezvous::describe(message.member);
    std::string only = only_in(holder, table.functions, message.functions) +
                       only_in(other, message.functions, table.functions);
    if (!only.empty()) only = fmt::format(": of {} and {}, {}", holder, other, only.substr(2));
    return Error(ErrorKind::kInvalid,
                 fmt::format("the workers' function tables differ{}; start the same program everywhere, or "
                             "allow functions that only some have with require_same_functions = false",
                             only));
  }
  return std::nullopt;
}

const Roster::Worker* Roster::find(int rank) const {
  const auto found = workers_.find(rank);
  return found == workers_.end() ? nullptr : &found->second;
}

const Roster::Worker* Roster::find(const std::string& name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : &workers_.at(found->second);
}

std::optional<int> Roster::rank_of(ConnectionId connection) const {
  const auto found = ranks_.find(connection);
  return found == ranks_.end() ? std::nullopt : std::optional(found->second);
}

int Roster::rank_for(const Member& member) {
  if (member.rank != kAnyRank) return member.rank;
  if (const Worker* former = find(member.name)) return former->member().rank;
  while (workers_.contains(unused_rank_)) ++unused_rank_;
  return unused_rank_;
}

std::optional<Error> Roster::difference_of_functions(const Register& message) const {
  return functions_.difference(message, [this](int rank) { return describe(workers_.at(rank).member()); });
}

Roster::Worker& Roster::enter(ConnectionId connection, Register message) {
  const int rank = message.member.rank;
  if (const auto former = workers_.find(rank); former != workers_.end())
    names_.erase(former->second.member().name);
  functions_.add(message);
  message.functions = {};
  names_[message.member.name] = rank;
  ranks_[connection] = rank;
  return workers_[rank] = {std::move(message), connection};
}

void Roster::leave(Worker& worker) {
  ranks_.erase(*worker.connection);
  functions_.remove(worker.registration);
  worker.connection.reset();
}

}  // namespace torchspan::rendezvous
