#include "rendezvous/store/roster.h"

#include <utility>

namespace torchspan::rendezvous {

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
