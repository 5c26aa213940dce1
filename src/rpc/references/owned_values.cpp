#include "rpc/references/owned_values.h"

namespace torchspan::rpc {
namespace {
/// For how many values the reason of their end is kept.
constexpr std::size_t kReasons = 256;
}  // namespace

bool OwnedValues::add_fork(GlobalId value, GlobalId fork, PeerId holder, const Keep& owner) {
  if (!presence_.present(holder)) return false;
  Owned& owned = owned_[value];
  owned.owner = owner;
  count(owned, fork, holder);
  return true;
}

OwnedValues::Keep OwnedValues::find(GlobalId value) const {
  auto it = owned_.find(value);
  return it == owned_.end() ? nullptr : it->second.owner;
}

void OwnedValues::expect_own(GlobalId value, const Keep& owner) {
  Owned& owned = owned_[value];
  owned.owner = owner;
  owned.came = false;
}

void OwnedValues::own_creation_ended(GlobalId value, Effects& effects) {
  auto it = owned_.find(value);
  if (it == owned_.end()) return;
  it->second.came = true;
  erase_if_unused(it, {}, effects);
}

OwnedValues::Keep OwnedValues::creation_arrived(GlobalId value, GlobalId fork, const Keep& fresh) {
  const PeerId creator = creator_of(value);
  if (!presence_.present(creator) || !created_[creator].insert(number_of(value))) return nullptr;
  Owned& owned = owned_[value];
  if (!owned.owner) owned.owner = fresh;
  owned.came = true;
  count(owned, fork, creator);
  return owned.owner;
}

void OwnedValues::creation_given_up(const RRefMessage& message, PeerId creator, Effects& effects) {
  if (creator_of(message.value) != creator || !presence_.present(creator)) return;
  if (!created_[creator].insert(number_of(message.value)))
    return remove_fork(message.value, message.fork, {Refusal::Why::kGivenUp, creator, message.reason},
                       effects);
  const Refusal why{Refusal::Why::kGivenUp, creator, message.reason};
  remember(message.value, why);
  if (auto it = owned_.find(message.value); it != owned_.end()) fail(it, why, effects);
}

std::optional<Refusal> OwnedValues::request_fork(GlobalId value, GlobalId fork, std::uint64_t number,
                                                 PeerId holder) {
  if (!presence_.present(holder)) return Refusal{Refusal::Why::kSenderDeparted, holder, {}};
  const bool first = requested_[holder].insert(number);
  auto it = owned_.find(value);
  if (!first) {
    if (it != owned_.end() && it->second.forks.contains(fork)) return std::nullopt;
    return why_gone(value);  // if counted and deleted since, nothing reads this answer
  }
  if (it == owned_.end()) {
    if (!may_arrive(value)) return why_gone(value);
    it = owned_.emplace(value, Owned{nullptr, {}, false}).first;
  }
  count(it->second, fork, holder);
  return std::nullopt;
}

OwnedValues::Found OwnedValues::receive_at_owner(GlobalId value, GlobalId fork, PeerId from,
                                                 const Keep& fresh, Effects& effects) {
  auto it = owned_.find(value);
  if (it == owned_.end()) {
    if (!may_arrive(value)) return {nullptr, why_gone(value)};
    it = owned_.emplace(value, Owned{nullptr, {}, false}).first;
  }
  if (!it->second.owner) it->second.owner = fresh;
  Found found{it->second.owner, std::nullopt};
  if (from == self_) remove_fork(value, fork, {}, effects);
  return found;
}

void OwnedValues::remove_fork(GlobalId value, GlobalId fork, const Refusal& why, Effects& effects) {
  auto it = owned_.find(value);
  if (it == owned_.end() || it->second.forks.erase(fork) == 0) return;
  --forks_;
  erase_if_unused(it, why, effects);
}

std::optional<PeerId> OwnedValues::holder_of(GlobalId value, GlobalId fork) const {
  const auto owned = owned_.find(value);
  if (owned == owned_.end()) return std::nullopt;
  const auto found = owned->second.forks.find(fork);
  return found == owned->second.forks.end() ? std::nullopt : std::optional(found->second);
}

void OwnedValues::depart(PeerId peer, Effects& effects) {
  created_.erase(peer);
  requested_.erase(peer);
  for (auto it = owned_.begin(); it != owned_.end();) {
    const Entry here = it++;
    forks_ -= std::erase_if(here->second.forks, [&](const auto& fork) { return fork.second == peer; });
    if (!here->second.came && creator_of(here->first) == peer) {
      fail(here, {Refusal::Why::kCreatorDeparted, peer, {}}, effects);
    } else {
      erase_if_unused(here, {Refusal::Why::kHolderDeparted, peer, {}}, effects);
    }
  }
}

void OwnedValues::forks_at(PeerId peer, Forks& forks) const {
  for (const auto& [value, owned] : owned_) {
    for (const auto& [fork, holder] : owned.forks) {
      if (holder == peer) forks[fork] = value;
    }
  }
}

void OwnedValues::clear(Effects& effects) {
  for (auto& [value, owned] : owned_) effects.released.push_back(std::move(owned.owner));
  owned_.clear();
  forks_ = 0;
}

std::size_t OwnedValues::remembered() const {
  std::size_t remembered = reasons_.size();
  for (const auto& [peer, numbers] : created_) remembered += numbers.intervals();
  for (const auto& [peer, numbers] : requested_) remembered += numbers.intervals();
  return remembered;
}

bool OwnedValues::may_arrive(GlobalId value) const {
  const PeerId creator = creator_of(value);
  if (creator == self_) return false;  // values that this worker itself creates are in the table
  switch (presence_.of(creator)) {
    case Presence::Standing::kUnknown:
      return true;
    case Presence::Standing::kDeparted:
      return false;
    case Presence::Standing::kPresent:
      break;
  }
  const auto created = created_.find(creator);
  return created == created_.end() || !created->second.contains(number_of(value));
}

Refusal OwnedValues::why_gone(GlobalId value) const {
  if (const auto known = reasons_.find(value); known != reasons_.end()) return known->second;
  const PeerId creator = creator_of(value);
  if (creator == self_ || presence_.present(creator)) return {};
  return {Refusal::Why::kCreatorDeparted, creator, {}};
}

void OwnedValues::remember(GlobalId value, Refusal why) {
  if (!reasons_.insert_or_assign(value, std::move(why)).second) return;
  oldest_reasons_.push_back(value);
  if (oldest_reasons_.size() <= kReasons) return;
  reasons_.erase(oldest_reasons_.front());
  oldest_reasons_.pop_front();
}

void OwnedValues::count(Owned& owned, GlobalId fork, PeerId holder) {
  if (owned.forks.emplace(fork, holder).second) ++forks_;
}

void OwnedValues::erase_if_unused(Entry it, const Refusal& why, Effects& effects) {
  if (!it->second.came || !it->second.forks.empty()) return;
  if (why.why != Refusal::Why::kReleased) remember(it->first, why);
  effects.released.push_back(std::move(it->second.owner));
  owned_.erase(it);
}

void OwnedValues::fail(Entry it, const Refusal& why, Effects& effects) {
  forks_ -= it->second.forks.size();
  if (it->second.owner) effects.failed.push_back({std::move(it->second.owner), why});
  owned_.erase(it);
}

}  // namespace torchspan::rpc
