#include "rpc/references.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/rpc/worker.h>

namespace torchspan::rpc {

References::References(std::weak_ptr<Endpoint> endpoint, std::uint32_t self)
    : endpoint_(std::move(endpoint)), table_(self) {}

void References::begin(PeerId self) {
  MutexLock lock(mutex_);
  table_.begin(self);
}

void References::joined(PeerId peer) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.join(peer, effects);
  }
  apply(std::move(effects));
}

void References::departed(PeerId peer) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.depart(peer, effects);
  }
  apply(std::move(effects));
}

Origin References::origin(SourceLocation site) const {
  auto endpoint = endpoint_.lock();
  return {site.file_name(), static_cast<std::uint32_t>(site.line()), false, 0,
          endpoint ? endpoint->runtime().executor.now() : TimePoint()};
}

Origin References::origin_from(PeerId from) const {
  Origin origin = this->origin({});
  origin.copied = true;
  origin.from = from.rank;
  return origin;
}

GlobalId References::next_id() {
  MutexLock lock(mutex_);
  return table_.next_id();
}

ReferencePtr References::own(ValuePtr value, const std::string& type, SourceLocation site) {
  const std::uint64_t tag = wire::digest(type);
  PeerId self;
  GlobalId id;
  {
    MutexLock lock(mutex_);
    self = table_.self();
    id = table_.next_value(self.rank);
    types_.try_emplace(tag, type);
  }
  auto owner = std::make_shared<OwnerReference>(endpoint_, self, id, tag, origin(site));
  owner->set(std::move(value));
  return owner;
}

std::shared_ptr<OwnerReference> References::begin_own_creation(const std::string& type, SourceLocation site) {
  const Origin origin = this->origin(site);
  const std::uint64_t tag = wire::digest(type);
  MutexLock lock(mutex_);
  const PeerId self = table_.self();
  types_.try_emplace(tag, type);
  auto owner = std::make_shared<OwnerReference>(endpoint_, self, table_.next_value(self.rank), tag, origin);
  table_.owned().expect_own(owner->value_id(), owner);
  return owner;
}

void References::own_creation_failed(std::shared_ptr<OwnerReference> owner, std::exception_ptr error) {
  owner->set_error(std::move(error));
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.owned().own_creation_ended(owner->value_id(), effects);
  }
  effects.released.push_back(std::move(owner));  // its value may be there after all
  apply(std::move(effects));
}

std::shared_ptr<UserReference> References::begin_creation(std::uint32_t to, const std::string& type,
                                                          SourceLocation site) {
  UserReference::Ids ids;
  {
    MutexLock lock(mutex_);
    ids = {table_.presence().latest(to), table_.next_value(to), table_.next_id(), wire::digest(type)};
    types_.try_emplace(ids.tag, type);
  }
  auto user = std::make_shared<UserReference>(endpoint_, weak_from_this(), ids, origin(site));
  MutexLock lock(mutex_);
  table_.held().add_creating(ids.owner, ids.value, ids.fork, user);
  return user;
}

void References::created(const std::shared_ptr<UserReference>& user) {
  user->confirm();
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.held().created(user->fork_id(), effects);
  }
  apply(std::move(effects));
}

void References::creation_failed(const std::shared_ptr<UserReference>& user,
                                 const std::exception_ptr& error) {
  const Error story = to_error(error);
  user->fail(error);
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    if (story.kind() == ErrorKind::kRemoteFailure) {
      table_.held().created(user->fork_id(), effects);  // its owner answered: a value that is a failure
    } else {
      table_.held().give_up(user->fork_id(), story.message(), effects);
    }
  }
  apply(std::move(effects));
}

void References::creation_not_sent(GlobalId fork, const std::exception_ptr& error) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.held().give_up(fork, to_error(error).message(), effects);
  }
  apply(std::move(effects));
}

std::shared_ptr<OwnerReference> References::arriving_creation(const wire::Handle& handle, PeerId from,
                                                              BytesView site) {
  RRefTable::Effects effects;
  std::shared_ptr<void> kept;
  std::shared_ptr<OwnerReference> fresh;
  {
    Origin origin = origin_from(from);
    MutexLock lock(mutex_);
    const PeerId self = table_.self();
    read_site(site, origin);
    if (handle.owner != self.rank || handle.incarnation != self.incarnation ||
        creator_of(handle.value) != from)
      throw Error(ErrorKind::kDisconnected,
                  "this creation was meant for another worker, or one that had this rank before; call again");
    fresh = std::make_shared<OwnerReference>(endpoint_, self, handle.value, handle.type_tag, origin);
    if (from == self) {
      kept = table_.owned().find(handle.value);
      table_.owned().own_creation_ended(handle.value, effects);
    } else {
      kept = table_.owned().creation_came(handle.value, handle.fork, fresh);
      if (kept && kept != fresh) std::static_pointer_cast<OwnerReference>(kept)->set_origin(origin);
    }
  }
  apply(std::move(effects));
  return kept ? std::static_pointer_cast<OwnerReference>(kept) : fresh;  // nobody else's when it is late
}

bool References::send_reference(const std::shared_ptr<void>& reference, PeerId to, wire::Handle& handle,
                                std::optional<Refusal>& dead) {
  const auto& state = static_cast<const Reference&>(*std::static_pointer_cast<Reference>(reference));
  handle = {state.owner(), state.value_id(), {}, state.type_tag()};
  std::optional<GlobalId> fork;
  if (state.is_owner()) {
    handle.incarnation = table_.self().incarnation;
    fork = table_.send_owner(handle.value, reference, to);
  } else {
    const PeerId owner = static_cast<const UserReference&>(state).owner_peer();
    handle.incarnation = owner.incarnation;
    if (table_.presence().of(owner) == Presence::Standing::kGone)
      dead = Refusal{Refusal::Why::kOwnerGone, owner, {}};
    if (!dead) fork = table_.send_user(reference, to);
  }
  handle.fork = fork.value_or(GlobalId());
  return fork.has_value();
}

std::vector<wire::Handle> References::to_handles(const std::vector<std::shared_ptr<void>>& references,
                                                 PeerId to) {
  for (const auto& reference : references) {
    if (!reference) continue;
    const auto state = std::static_pointer_cast<Reference>(reference);
    state->endpoint();  // a deleted reference cannot travel
    const Future<void> ready = state->ready();
    if (ready.done()) ready.wait();  // nor can one whose creation failed
  }
  std::vector<wire::Handle> handles;
  handles.reserve(references.size());
  RRefTable::Effects effects;
  std::optional<Refusal> dead;
  {
    MutexLock lock(mutex_);  // once: who asks what is on its way hears of all of them or of none
    bool all = true;
    for (auto it = references.begin(); it != references.end() && all; ++it) {
      wire::Handle& handle = handles.emplace_back();
      all = !*it || send_reference(*it, to, handle, dead);
    }
    if (all) return handles;
    for (const wire::Handle& handle : handles) table_.unsend(handle, effects);
  }
  apply(std::move(effects));
  if (dead) throw refused(handles.back().value, *dead);
  throw Error(ErrorKind::kDisconnected, "the worker died or left before this reference could be sent to it");
}

void References::undo(const std::vector<wire::Handle>& handles) {
  if (handles.empty()) return;
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    for (const wire::Handle& handle : handles) table_.unsend(handle, effects);
  }
  apply(std::move(effects));
}

std::optional<std::shared_ptr<void>> References::from_handle(const wire::Handle& handle, PeerId from) {
  if (handle == wire::Handle{}) return nullptr;
  bool home = false;
  {
    MutexLock lock(mutex_);
    if (table_.held().is_missing(handle.fork, from)) return std::nullopt;
    home = handle.owner == table_.self().rank;
  }
  return home ? come_home(handle, from) : adopt(handle, from);
}

std::shared_ptr<void> References::come_home(const wire::Handle& handle, PeerId from) {
  RRefTable::Effects effects;
  OwnedValues::Found found;
  const Origin origin = origin_from(from);
  std::shared_ptr<OwnerReference> fresh;
  {
    MutexLock lock(mutex_);
    fresh = std::make_shared<OwnerReference>(endpoint_, table_.self(), handle.value, handle.type_tag, origin);
    found = table_.come_home(handle, from, fresh, effects);
  }
  if (found.refusal) {
    fresh->set_error(std::make_exception_ptr(refused(handle.value, *found.refusal)));
    found.owner = fresh;
  }
  apply(std::move(effects));
  return found.owner;
}

std::shared_ptr<void> References::adopt(const wire::Handle& handle, PeerId from) {
  const PeerId owner{handle.owner, handle.incarnation};
  auto user = std::make_shared<UserReference>(
      endpoint_, weak_from_this(), UserReference::Ids{owner, handle.value, handle.fork, handle.type_tag},
      origin_from(from));
  RRefTable::Effects effects;
  std::optional<Refusal> refusal;
  {
    MutexLock lock(mutex_);
    refusal = table_.held().adopt(handle, from, user, effects);
  }
  if (refusal) {
    user->fail(std::make_exception_ptr(refused(handle.value, *refusal)));
  } else if (owner == from) {
    user->confirm();
  }
  apply(std::move(effects));
  return user;
}

std::vector<std::shared_ptr<void>> References::from_handles(const std::vector<wire::Handle>& handles,
                                                            PeerId from) {
  std::vector<std::shared_ptr<void>> references;
  references.reserve(handles.size());
  bool lost = false;
  for (const wire::Handle& handle : handles) {
    if (auto reference = from_handle(handle, from)) {
      references.push_back(std::move(*reference));
    } else {
      lost = true;
    }
  }
  if (!lost) return references;
  let_go(std::move(references));  // the others came, and their sender hears that they are given back
  throw Error(ErrorKind::kDisconnected,
              "a reference in this message was taken for lost when a connection broke; send it again");
}

/// Why a value cannot be had, for people.
Error References::refused(GlobalId value, const Refusal& refusal) const {
  auto endpoint = endpoint_.lock();
  const std::string who = endpoint ? fmt::format("worker '{}'", endpoint->name_of(refusal.who.rank))
                                   : fmt::format("rank {}", refusal.who.rank);
  const std::string what = fmt::format("value {}:{} cannot be had: ", value.worker, value.local);
  const auto gone = [&](const std::string& why) { return Error(ErrorKind::kDisconnected, what + why); };
  switch (refusal.why) {
    case Refusal::Why::kHolderGone:
      return gone(who +
                  ", through which it was shared, died or left before its owner knew of this "
                  "reference; make the value again");
    case Refusal::Why::kCreatorGone:
      return gone(who + ", which created it, died or left, and no other reference was known to its owner");
    case Refusal::Why::kGivenUp:
      return Error(ErrorKind::kCancelled,
                   fmt::format("{}{}, which created it, gave the creation up: {}", what, who, refusal.text));
    case Refusal::Why::kOtherOwner:
      return gone("it lived in an earlier process of its owner, which ended");
    case Refusal::Why::kOwnerGone:
      return gone(who + ", its owner, died or left, and the value with it");
    case Refusal::Why::kSenderGone:
      return gone(who + ", which sent this reference, died or left before its owner knew of it");
    case Refusal::Why::kLetGo:
      break;
  }
  return gone(
      "its owner destroyed the value before it heard of this reference: all references that it knew of were "
      "released");
}

void References::release(GlobalId fork) {
  RRefTable::Effects effects;
  {
    MutexLock lock(mutex_);
    table_.held().release(fork, effects);
  }
  apply(std::move(effects));
}

RRefTable::Counts References::counts() const {
  MutexLock lock(mutex_);
  return table_.counts();
}

bool References::settled() const {
  MutexLock lock(mutex_);
  const auto counts = table_.counts();
  return counts.pending_users == 0 && counts.pending_children == 0 && in_flight_.empty() && audits_.empty();
}

void References::leave(bool alone) {
  MutexLock lock(mutex_);
  leaving_ = true;
  alone_ = alone;
}

void References::delete_users() {
  RRefTable::Effects effects;
  std::vector<std::shared_ptr<void>> living;
  {
    MutexLock lock(mutex_);
    living = table_.held().release_all(effects);
  }
  for (const auto& user : living) std::static_pointer_cast<UserReference>(user)->detach();
  apply(std::move(effects));
}

void References::clear() {
  RRefTable::Effects effects;
  std::vector<std::shared_ptr<void>> living;
  {
    MutexLock lock(mutex_);
    for (const auto& [fork, user] : table_.held().all()) {
      if (auto alive = user.reference.lock()) living.push_back(std::move(alive));
    }
    table_.clear(effects);
  }
  for (const auto& user : living) std::static_pointer_cast<UserReference>(user)->detach();
  // Calls that wait for a reference hold it too: they let go when it is settled.
  const auto reason = std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "this worker was shut down before the value came"));
  for (const auto& kept : effects.released) {
    if (kept) std::static_pointer_cast<Reference>(kept)->abandon(reason);
  }
}

}  // namespace torchspan::rpc
