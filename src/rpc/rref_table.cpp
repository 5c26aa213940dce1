#include "rpc/rref_table.h"

namespace torchspan::rpc {

void RRefTable::add_fork(GlobalId value, GlobalId fork, std::uint32_t holder, const Keep& owner) {
  if (tombstones_.erase(fork) != 0) return;
  Owned& owned = owned_[value];
  owned.owner = owner;
  owned.forks.emplace(fork, holder);
}

RRefTable::Keep RRefTable::find_owner(GlobalId value) const {
  auto it = owned_.find(value);
  return it == owned_.end() ? nullptr : it->second.owner;
}

void RRefTable::expect_owner(GlobalId value, const Keep& owner) {
  Owned& owned = owned_[value];
  owned.owner = owner;
  owned.expected = true;
}

void RRefTable::creation_arrived(GlobalId value, Effects& effects) {
  auto it = owned_.find(value);
  if (it == owned_.end()) return;
  it->second.expected = false;
  erase_if_unused(value, effects);
}

GlobalId RRefTable::send_child(const Keep& parent, std::uint32_t to) {
  const GlobalId child = next_id();
  pending_children_.emplace(child, PendingChild{parent, to});
  return child;
}

void RRefTable::undo_child(GlobalId child, Effects& effects) {
  auto it = pending_children_.find(child);
  if (it == pending_children_.end()) return;
  effects.released.push_back(std::move(it->second.parent));
  pending_children_.erase(it);
}

void RRefTable::adopt_child(const wire::Handle& handle, std::uint32_t parent, const Keep& user,
                            Effects& effects) {
  pending_users_[handle.fork] = {user, parent};
  effects.messages.push_back({RRefMessage::Kind::kForkRequest, handle.owner, handle.value, handle.fork});
}

void RRefTable::confirm_user(GlobalId fork, Effects& effects) {
  auto it = pending_users_.find(fork);
  if (it == pending_users_.end()) return;
  if (it->second.parent) {
    effects.messages.push_back({RRefMessage::Kind::kChildAccept, *it->second.parent, {}, fork});
  }
  effects.released.push_back(std::move(it->second.user));
  pending_users_.erase(it);
}

void RRefTable::accept_at_owner(const wire::Handle& handle, std::uint32_t parent, Effects& effects) {
  auto it = owned_.find(handle.value);
  if (it != owned_.end() && it->second.forks.erase(handle.fork) != 0) {  // our own fork came home
    erase_if_unused(handle.value, effects);
    return;
  }
  effects.messages.push_back({RRefMessage::Kind::kChildAccept, parent, handle.value, handle.fork});
}

void RRefTable::on_fork_request(GlobalId value, GlobalId fork, std::uint32_t holder) {
  if (tombstones_.erase(fork) != 0) return;
  auto it = owned_.find(value);
  if (it != owned_.end()) it->second.forks.emplace(fork, holder);
}

void RRefTable::on_user_delete(GlobalId value, GlobalId fork, Effects& effects) {
  auto it = owned_.find(value);
  if (it == owned_.end() || it->second.forks.erase(fork) == 0) {
    tombstones_.insert(fork);
    return;
  }
  erase_if_unused(value, effects);
}

void RRefTable::on_departure(std::uint32_t rank, Effects& effects) {
  std::vector<GlobalId> touched;
  for (auto& [value, owned] : owned_) {
    if (std::erase_if(owned.forks, [&](const auto& fork) { return fork.second == rank; }) != 0)
      touched.push_back(value);
  }
  for (GlobalId value : touched) erase_if_unused(value, effects);
  std::erase_if(pending_children_, [&](auto& child) {
    if (child.second.to != rank) return false;
    effects.released.push_back(std::move(child.second.parent));
    return true;
  });
}

RRefTable::Forks RRefTable::forks_at(std::uint32_t rank) const {
  Forks forks;
  for (const auto& [value, owned] : owned_) {
    for (const auto& [fork, holder] : owned.forks) {
      if (holder == rank) forks[fork] = value;
    }
  }
  for (const auto& [fork, child] : pending_children_) {
    if (child.to == rank) forks[fork] = {};
  }
  return forks;
}

void RRefTable::on_lost(GlobalId value, GlobalId fork, Effects& effects) {
  undo_child(fork, effects);
  auto it = owned_.find(value);
  if (it == owned_.end() || it->second.forks.erase(fork) == 0) return;
  erase_if_unused(value, effects);
}

void RRefTable::erase_if_unused(GlobalId value, Effects& effects) {
  auto it = owned_.find(value);
  if (it == owned_.end() || it->second.expected || !it->second.forks.empty()) return;
  effects.released.push_back(std::move(it->second.owner));
  owned_.erase(it);
}

RRefTable::Counts RRefTable::counts() const {
  Counts counts;
  counts.owners = owned_.size();
  for (const auto& [value, owned] : owned_) counts.forks += owned.forks.size();
  counts.pending_users = pending_users_.size();
  counts.pending_children = pending_children_.size();
  return counts;
}

std::vector<RRefTable::Leak> RRefTable::leaks() const {
  std::vector<Leak> leaks;
  for (const auto& [value, owned] : owned_) {
    Leak leak{value, {}};
    for (const auto& [fork, holder] : owned.forks) leak.forks.push_back(fork);
    leaks.push_back(std::move(leak));
  }
  return leaks;
}

void RRefTable::clear(Effects& effects) {
  for (auto& [value, owned] : owned_) effects.released.push_back(std::move(owned.owner));
  for (auto& [fork, user] : pending_users_) effects.released.push_back(std::move(user.user));
  for (auto& [fork, child] : pending_children_) effects.released.push_back(std::move(child.parent));
  owned_.clear();
  pending_users_.clear();
  pending_children_.clear();
}

}  // namespace torchspan::rpc
