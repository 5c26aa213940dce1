#include "rpc/references/held_references.h"

namespace torchspan::rpc {

namespace {
/// How many forks reported to a peer as lost are recognized if they arrive later.
constexpr std::size_t kMissing = 1u << 16;
}  // namespace

void HeldReferences::add_creating(PeerId owner, GlobalId value, GlobalId fork, const Keep& user) {
  users_[fork] = {owner, value, user, true};
  pending_[fork] = {user, std::nullopt};
}

void HeldReferences::created(GlobalId fork, Effects& effects) { fork_answered(fork, true, effects); }

void HeldReferences::give_up(GlobalId fork, std::string reason, Effects& effects) {
  const auto user = users_.find(fork);
  if (user == users_.end() || !pending_.contains(fork)) return;
  const User& gone = user->second;
  if (presence_.present(gone.owner)) {
    effects.messages.push_back(
        {RRefMessage::Kind::kGivenUp, gone.owner, gone.value, fork, 0, std::move(reason)});
  }
  fork_answered(fork, false, effects);
}

std::optional<Refusal> HeldReferences::adopt(const wire::Handle& handle, PeerId parent, const Keep& user,
                                             Effects& effects) {
  const PeerId owner{handle.owner, handle.incarnation};
  if (users_.contains(handle.fork) || pending_.contains(handle.fork))
    return Refusal{Refusal::Why::kSentTwice, parent, {}};
  users_[handle.fork] = {owner, handle.value, user, true};
  const Presence::Standing standing = presence_.of(owner);
  if (standing == Presence::Standing::kDeparted) {
    pending_[handle.fork] = {user, parent};
    fork_answered(handle.fork, false, effects);
    return Refusal{Refusal::Why::kOwnerDeparted, owner, {}};
  }
  if (owner == parent) return std::nullopt;
  pending_[handle.fork] = {user, parent};
  effects.messages.push_back(
      {RRefMessage::Kind::kForkRequest, owner, handle.value, handle.fork, ++asked_[owner.rank], {}});
  return std::nullopt;
}

void HeldReferences::fork_answered(GlobalId fork, bool counted, Effects& effects) {
  const auto it = pending_.find(fork);
  if (it == pending_.end()) return;
  if (it->second.parent && presence_.present(*it->second.parent))
    effects.messages.push_back({RRefMessage::Kind::kChildAccept, *it->second.parent, {}, fork, 0, {}});
  effects.released.push_back(std::move(it->second.user));
  pending_.erase(it);
  if (!counted) users_[fork].counted = false;
}

void HeldReferences::release(GlobalId fork, Effects& effects) {
  const auto it = users_.find(fork);
  if (it == users_.end()) return;
  const User user = std::move(it->second);
  users_.erase(it);
  if (!user.counted || !presence_.present(user.owner)) return;
  effects.messages.push_back({RRefMessage::Kind::kUserDelete, user.owner, user.value, fork, 0, {}});
}

void HeldReferences::release_child(GlobalId child, Effects& effects) {
  const auto it = children_.find(child);
  if (it == children_.end()) return;
  effects.released.push_back(std::move(it->second.parent));
  children_.erase(it);
}

std::optional<PeerId> HeldReferences::receiver_of(GlobalId child) const {
  const auto found = children_.find(child);
  return found == children_.end() ? std::nullopt : std::optional(found->second.to);
}

std::vector<GlobalId> HeldReferences::missing(const std::vector<GlobalId>& forks, PeerId from) {
  std::vector<GlobalId> lost;
  for (const GlobalId& fork : forks) {
    const auto user = users_.find(fork);
    if (user != users_.end() && user->second.counted) continue;
    lost.push_back(fork);
    if (user != users_.end() || !presence_.present(from)) continue;
    Missing& missing = missing_[from];
    if (!missing.forks.insert(fork).second) continue;
    missing.oldest.push_back(fork);
    if (missing.oldest.size() <= kMissing) continue;
    missing.forks.erase(missing.oldest.front());
    missing.oldest.pop_front();
  }
  return lost;
}

bool HeldReferences::is_missing(GlobalId fork, PeerId from) const {
  const auto found = missing_.find(from);
  return found != missing_.end() && found->second.forks.contains(fork);
}

void HeldReferences::depart(PeerId peer, Effects& effects) {
  missing_.erase(peer);
  std::erase_if(children_, [&](auto& child) {
    if (child.second.to != peer) return false;
    effects.released.push_back(std::move(child.second.parent));
    return true;
  });
}

void HeldReferences::children_at(PeerId peer, std::map<GlobalId, GlobalId>& forks) const {
  for (const auto& [fork, child] : children_) {
    if (child.to == peer) forks[fork] = {};
  }
}

std::vector<HeldReferences::Keep> HeldReferences::release_all(Effects& effects) {
  std::vector<Keep> living;
  for (auto it = users_.begin(); it != users_.end();) {
    const auto here = it++;
    if (pending_.contains(here->first)) continue;
    auto alive = here->second.reference.lock();
    if (!alive) continue;  // it is just ending, and reports that itself
    living.push_back(std::move(alive));
    release(GlobalId(here->first), effects);
  }
  return living;
}

void HeldReferences::clear(Effects& effects) {
  for (auto& [fork, user] : pending_) effects.released.push_back(std::move(user.user));
  for (auto& [fork, child] : children_) effects.released.push_back(std::move(child.parent));
  pending_.clear();
  children_.clear();
  users_.clear();
}

std::shared_ptr<void> HeldReferences::find(GlobalId fork) const {
  const auto it = users_.find(fork);
  return it == users_.end() ? nullptr : it->second.reference.lock();
}

std::size_t HeldReferences::remembered() const {
  std::size_t remembered = 0;
  for (const auto& [peer, missing] : missing_) remembered += missing.forks.size();
  return remembered;
}

}  // namespace torchspan::rpc
