#include "rpc/references/rref_table.h"

namespace torchspan::rpc {

RRefTable::RRefTable(std::uint32_t self) { begin({self, 0}); }

void RRefTable::begin(PeerId self) {
  self_ = self;
  presence_.begin(self);
  owned_.begin(self);
}

void RRefTable::join(PeerId peer, Effects& effects) {
  if (const auto before = presence_.join(peer)) {
    owned_.depart(*before, effects);
    held_.depart(*before, effects);
  }
}

void RRefTable::depart(PeerId peer, Effects& effects) {
  if (!presence_.depart(peer)) return;
  owned_.depart(peer, effects);
  held_.depart(peer, effects);
}

GlobalId RRefTable::next_id() {
  return {self_.rank, (std::uint64_t{self_.incarnation} << kIncarnationShift) + ++counter_};
}

GlobalId RRefTable::next_value(std::uint32_t owner) {
  return {self_.rank, (std::uint64_t{self_.incarnation} << kIncarnationShift) + ++values_[owner]};
}

std::optional<GlobalId> RRefTable::send_owner(GlobalId value, const Keep& owner, PeerId to) {
  const GlobalId fork = next_id();
  if (!owned_.add_fork(value, fork, to, owner)) return std::nullopt;
  return fork;
}

std::optional<GlobalId> RRefTable::send_user(const Keep& user, PeerId to) {
  if (!presence_.present(to)) return std::nullopt;
  const GlobalId child = next_id();
  held_.send_child(child, user, to);
  return child;
}

void RRefTable::unsend(const wire::Handle& handle, Effects& effects) {
  lost(handle.value, handle.fork, effects);
}

OwnedValues::Found RRefTable::receive_at_owner(const wire::Handle& handle, PeerId from, const Keep& fresh,
                                               Effects& effects) {
  OwnedValues::Found found;
  if (handle.incarnation == self_.incarnation) {
    found = owned_.receive_at_owner(handle.value, handle.fork, from, fresh, effects);
  } else {
    found.refusal = Refusal{Refusal::Why::kOtherOwner, {handle.owner, handle.incarnation}, {}};
  }
  if (from != self_ && presence_.present(from))
    effects.messages.push_back({RRefMessage::Kind::kChildAccept, from, handle.value, handle.fork, 0, {}});
  return found;
}

std::optional<Refusal> RRefTable::receive(const RRefMessage& message, PeerId from, Effects& effects) {
  switch (message.kind) {
    case RRefMessage::Kind::kForkRequest:
      if (message.to != self_) return Refusal{Refusal::Why::kOtherOwner, message.to, {}};
      return owned_.request_fork(message.value, message.fork, message.number, from);
    case RRefMessage::Kind::kChildAccept:
      if (held_.receiver_of(message.fork) == from) held_.release_child(message.fork, effects);
      break;
    case RRefMessage::Kind::kUserDelete:
      if (owned_.holder_of(message.value, message.fork) == from)
        owned_.remove_fork(message.value, message.fork, {}, effects);
      break;
    case RRefMessage::Kind::kGivenUp:
      owned_.creation_given_up(message, from, effects);
      break;
  }
  return std::nullopt;
}

RRefTable::Forks RRefTable::forks_at(PeerId peer) const {
  Forks forks;
  owned_.forks_at(peer, forks);
  held_.children_at(peer, forks);
  return forks;
}

void RRefTable::lost(GlobalId value, GlobalId fork, Effects& effects) {
  held_.release_child(fork, effects);
  owned_.remove_fork(value, fork, {}, effects);
}

RRefTable::Counts RRefTable::counts() const {
  Counts counts;
  counts.owners = owned_.size();
  counts.forks = owned_.forks();
  counts.users = held_.all().size();
  counts.pending_users = held_.pending_count();
  counts.pending_children = held_.children_count();
  counts.remembered = owned_.remembered() + held_.remembered();
  return counts;
}

void RRefTable::clear(Effects& effects) {
  owned_.clear(effects);
  held_.clear(effects);
}

}  // namespace torchspan::rpc
