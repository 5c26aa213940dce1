#include "rpc/references/references.h"

#include <algorithm>
#include <fmt/format.h>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/rpc/debug.h>
#include <torchspan/rpc/worker.h>

#include "rpc/calls/call_table.h"
#include "rpc/references/program_names.h"
#include "rpc/references/rref_table.h"

namespace torchspan::rpc {
namespace {

/// How many entries are read at a time under the lock.
constexpr std::size_t kPortion = 256;

std::string text(GlobalId id) { return std::to_string(id.worker) + ":" + std::to_string(id.local); }

/// Calls `add` for the next entries of a map after `last`. Returns false if these were all.
template <class Map, class Add>
bool read_portion(const Map& map, std::optional<GlobalId>& last, Add&& add) {
  auto it = last ? map.upper_bound(*last) : map.begin();
  for (std::size_t i = 0; i < kPortion && it != map.end(); ++i, ++it) {
    add(it->first, it->second);
    last = it->first;
  }
  return it != map.end();
}

/// What is read of an entry under the lock.
struct Entry {
  RRefInfo::Role role = RRefInfo::Role::kOwner;
  GlobalId value = {};
  GlobalId fork = {};
  std::uint32_t owner = 0;
  std::vector<std::uint32_t> holders = {};
  Origin origin = {};
  std::uint64_t tag = 0;
  KnownSize size = {};
  bool there = true;
  std::shared_ptr<void> pinned = {};  ///< its destructor takes the lock

  void read(const OwnerReference& reference) {
    origin = reference.origin();
    tag = reference.type_tag();
    size = reference.size();
  }
  void read(const UserReference& reference) {
    value = reference.value_id();
    owner = reference.owner();
    origin = reference.origin();
    tag = reference.type_tag();
  }
};

std::vector<Entry> read_owned(const SharedRRefTable& shared) {
  std::vector<Entry> entries;
  std::optional<GlobalId> last;
  for (bool more = true; more;) {
    MutexLock lock(shared.mutex);
    const std::uint32_t self = shared.table.self().rank;
    more =
        read_portion(shared.table.owned().all(), last, [&](GlobalId value, const OwnedValues::Owned& owned) {
          Entry entry{.role = RRefInfo::Role::kOwner, .value = value, .owner = self, .there = owned.came};
          for (const auto& [fork, holder] : owned.forks) entry.holders.push_back(holder.rank);
          if (owned.owner)
            entry.read(static_cast<const OwnerReference&>(*std::static_pointer_cast<Reference>(owned.owner)));
          entries.push_back(std::move(entry));
        });
  }
  return entries;
}

void read_held(const SharedRRefTable& shared, std::vector<Entry>& entries) {
  std::optional<GlobalId> last;
  for (bool more = true; more;) {
    MutexLock lock(shared.mutex);
    const HeldReferences& held = shared.table.held();
    more = read_portion(held.all(), last, [&](GlobalId fork, const HeldReferences::User& user) {
      auto alive = user.reference.lock();
      if (!alive) return;  // it is just ending
      Entry entry{.role = held.pending(fork) ? RRefInfo::Role::kPendingFork : RRefInfo::Role::kUser,
                  .fork = fork};
      entry.read(static_cast<const UserReference&>(*std::static_pointer_cast<Reference>(alive)));
      entry.pinned = std::move(alive);
      entries.push_back(std::move(entry));
    });
  }
  last.reset();
  for (bool more = true; more;) {
    MutexLock lock(shared.mutex);
    more = read_portion(
        shared.table.held().children(), last, [&](GlobalId fork, const HeldReferences::Child& child) {
          Entry entry{.role = RRefInfo::Role::kPendingChild, .fork = fork, .holders = {child.to.rank}};
          entry.read(static_cast<const UserReference&>(*std::static_pointer_cast<Reference>(child.parent)));
          entries.push_back(std::move(entry));
        });
  }
}

std::vector<RRefInfo> describe(const std::vector<Entry>& entries, const ProgramNames& names,
                               WorkerBackend& backend) {
  const auto types = names.types();
  const TimePoint now = backend.runtime().executor.now();
  std::vector<RRefInfo> list;
  list.reserve(entries.size());
  for (const Entry& entry : entries) {
    RRefInfo& info = list.emplace_back();
    const Origin& origin = entry.origin;
    info.role = entry.role;
    info.value = text(entry.value);
    if (entry.role != RRefInfo::Role::kOwner) info.fork = text(entry.fork);
    if (const auto type = types.find(entry.tag); type != types.end()) info.type = type->second;
    info.bytes = entry.size;
    info.age = now - origin.since;
    if (origin.line != 0) info.site = std::string(file_of(origin.file)) + ":" + std::to_string(origin.line);
    info.creator = backend.name_of(entry.value.worker);
    info.owner = backend.name_of(entry.owner);
    const bool copied = entry.role == RRefInfo::Role::kUser || entry.role == RRefInfo::Role::kPendingFork;
    if (copied && origin.copied) info.from = backend.name_of(origin.from);
    for (const std::uint32_t holder : entry.holders) ++info.holders[backend.name_of(holder)];
    info.there = entry.there;
  }
  return list;
}

/// Adds a reference to the table as sent, and sets its handle. Returns false if it cannot be sent; sets `dead` if its
/// owner is gone.
bool send_reference(RRefTable& table, const std::shared_ptr<void>& reference, PeerId to, wire::Handle& handle,
                    std::optional<Refusal>& dead) {
  const auto& state = static_cast<const Reference&>(*std::static_pointer_cast<Reference>(reference));
  handle = {state.owner(), state.value_id(), {}, state.type_tag()};
  std::optional<GlobalId> fork;
  if (state.is_owner()) {
    handle.incarnation = table.self().incarnation;
    fork = table.send_owner(handle.value, reference, to);
  } else {
    const PeerId owner = static_cast<const UserReference&>(state).owner_peer();
    handle.incarnation = owner.incarnation;
    if (table.presence().of(owner) == Presence::Standing::kDeparted)
      dead = Refusal{Refusal::Why::kOwnerDeparted, owner, {}};
    if (!dead) fork = table.send_user(reference, to);
  }
  handle.fork = fork.value_or(GlobalId());
  return fork.has_value();
}

}  // namespace

References::References(std::weak_ptr<WorkerBackend> backend, std::uint32_t self)
    : backend_(std::move(backend)),
      shared_(std::make_shared<SharedRRefTable>(self)),
      driver_(std::make_shared<RRefDriver>(backend_, shared_)) {}

void References::begin(PeerId self) {
  MutexLock lock(shared_->mutex);
  shared_->table.begin(self);
}

void References::joined(PeerId peer) {
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) { table.join(peer, effects); });
}

void References::departed(PeerId peer) {
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) { table.depart(peer, effects); });
}

Origin References::origin(SourceLocation site) const {
  auto backend = backend_.lock();
  return {site.file_name(), static_cast<std::uint32_t>(site.line()), false, 0,
          backend ? backend->runtime().executor.now() : TimePoint()};
}

Origin References::origin_from(PeerId from) const {
  Origin origin = this->origin({});
  origin.copied = true;
  origin.from = from.rank;
  return origin;
}

GlobalId References::next_id() {
  MutexLock lock(shared_->mutex);
  return shared_->table.next_id();
}

ReferencePtr References::own(ValuePtr value, const std::string& type, SourceLocation site) {
  const std::uint64_t tag = wire::digest(type);
  PeerId self;
  GlobalId id;
  {
    MutexLock lock(shared_->mutex);
    self = shared_->table.self();
    id = shared_->table.next_value(self.rank);
  }
  names_.add_type(tag, type);
  auto owner = make_process_shared<OwnerReference>(backend_, self, id, tag, origin(site));
  owner->set(std::move(value));
  return owner;
}

std::shared_ptr<OwnerReference> References::begin_own_creation(const std::string& type, SourceLocation site) {
  const Origin origin = this->origin(site);
  const std::uint64_t tag = wire::digest(type);
  names_.add_type(tag, type);
  MutexLock lock(shared_->mutex);
  const PeerId self = shared_->table.self();
  auto owner =
      make_process_shared<OwnerReference>(backend_, self, shared_->table.next_value(self.rank), tag, origin);
  shared_->table.owned().expect_own(owner->value_id(), owner);
  return owner;
}

void References::own_creation_failed(std::shared_ptr<OwnerReference> owner, std::exception_ptr error) {
  owner->set_error(std::move(error));
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    table.owned().own_creation_ended(owner->value_id(), effects);
    effects.released.push_back(std::move(owner));  // it may hold a value all the same
  });
}

std::shared_ptr<UserReference> References::begin_creation(std::uint32_t to, const std::string& type,
                                                          SourceLocation site) {
  UserReference::Ids ids;
  {
    MutexLock lock(shared_->mutex);
    ids = {shared_->table.presence().latest(to), shared_->table.next_value(to), shared_->table.next_id(),
           wire::digest(type)};
  }
  names_.add_type(ids.tag, type);
  auto user = make_process_shared<UserReference>(backend_, weak_from_this(), ids, origin(site));
  MutexLock lock(shared_->mutex);
  shared_->table.held().add_creating(ids.owner, ids.value, ids.fork, user);
  return user;
}

void References::created(const std::shared_ptr<UserReference>& user) {
  user->confirm();
  driver_->change(
      [&](RRefTable& table, RRefTable::Effects& effects) { table.held().created(user->fork_id(), effects); });
}

void References::creation_failed(const std::shared_ptr<UserReference>& user,
                                 const std::exception_ptr& error) {
  const Error as_error = to_error(error);
  user->fail(error);
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    if (as_error.kind() == ErrorKind::kRemoteFailure || !as_error.frames().empty()) {
      table.held().created(user->fork_id(), effects);  // its owner answered: the value is a failure
    } else {
      table.held().give_up(user->fork_id(), as_error.message(), effects);
    }
  });
}

void References::creation_not_sent(GlobalId fork, const std::exception_ptr& error) {
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    table.held().give_up(fork, to_error(error).message(), effects);
  });
}

std::shared_ptr<OwnerReference> References::arriving_creation(const wire::Handle& handle, PeerId from,
                                                              BytesView site) {
  std::shared_ptr<void> kept;
  std::shared_ptr<OwnerReference> fresh;
  Origin origin = origin_from(from);
  names_.read_site(site, origin);
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    const PeerId self = table.self();
    if (handle.owner != self.rank || handle.incarnation != self.incarnation ||
        creator_of(handle.value) != from)
      throw Error(
          ErrorKind::kDisconnected,
          "this creation is addressed to another worker, or to an earlier process of this rank; call again");
    fresh = make_process_shared<OwnerReference>(backend_, self, handle.value, handle.type_tag, origin);
    if (from == self) {
      kept = table.owned().find(handle.value);
      table.owned().own_creation_ended(handle.value, effects);
    } else {
      kept = table.owned().creation_arrived(handle.value, handle.fork, fresh);
      if (kept && kept != fresh) std::static_pointer_cast<OwnerReference>(kept)->set_origin(origin);
    }
  });
  return kept ? std::static_pointer_cast<OwnerReference>(kept) : fresh;  // unshared if it does not count
}

std::vector<wire::Handle> References::to_handles(const std::vector<std::shared_ptr<void>>& references,
                                                 PeerId to) {
  for (const auto& reference : references) {
    if (!reference) continue;
    const auto state = std::static_pointer_cast<Reference>(reference);
    state->backend();  // throws if the reference is deleted
    const Future<void> ready = state->ready();
    if (ready.done()) ready.wait();  // throws if its creation failed
  }
  std::vector<wire::Handle> handles;
  handles.reserve(references.size());
  bool all = true;
  std::optional<Refusal> dead;
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {  // once: an audit sees all or none
    for (auto it = references.begin(); it != references.end() && all; ++it) {
      wire::Handle& handle = handles.emplace_back();
      all = !*it || send_reference(table, *it, to, handle, dead);
    }
    if (all) return;
    for (const wire::Handle& handle : handles) table.unsend(handle, effects);
  });
  if (all) return handles;
  if (dead) throw driver_->refused(handles.back().value, *dead);
  throw Error(ErrorKind::kDisconnected, "the worker died or left before this reference could be sent to it");
}

void References::undo(const std::vector<wire::Handle>& handles) {
  if (handles.empty()) return;
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    for (const wire::Handle& handle : handles) table.unsend(handle, effects);
  });
}

std::optional<std::shared_ptr<void>> References::from_handle(const wire::Handle& handle, PeerId from) {
  if (handle == wire::Handle{}) return nullptr;
  bool home = false;
  {
    MutexLock lock(shared_->mutex);
    if (shared_->table.held().is_missing(handle.fork, from)) return std::nullopt;
    home = handle.owner == shared_->table.self().rank;
  }
  return home ? receive_at_owner(handle, from) : adopt(handle, from);
}

std::shared_ptr<void> References::receive_at_owner(const wire::Handle& handle, PeerId from) {
  OwnedValues::Found found;
  const Origin origin = origin_from(from);
  std::shared_ptr<OwnerReference> fresh;
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    fresh =
        make_process_shared<OwnerReference>(backend_, table.self(), handle.value, handle.type_tag, origin);
    found = table.receive_at_owner(handle, from, fresh, effects);
  });
  if (!found.refusal) return found.owner;
  fresh->set_error(std::make_exception_ptr(driver_->refused(handle.value, *found.refusal)));
  return fresh;
}

std::shared_ptr<void> References::adopt(const wire::Handle& handle, PeerId from) {
  const PeerId owner{handle.owner, handle.incarnation};
  auto user = make_process_shared<UserReference>(
      backend_, weak_from_this(), UserReference::Ids{owner, handle.value, handle.fork, handle.type_tag},
      origin_from(from));
  std::optional<Refusal> refusal;
  driver_->change([&](RRefTable& table, RRefTable::Effects& effects) {
    refusal = table.held().adopt(handle, from, user, effects);
  });
  if (refusal && refusal->why == Refusal::Why::kSentTwice) {
    user->detach();  // the number belongs to the other reference
    throw Error(driver_->refused(handle.value, *refusal));
  }
  if (refusal) {
    user->fail(std::make_exception_ptr(driver_->refused(handle.value, *refusal)));
  } else if (owner == from) {
    user->confirm();
  }
  return user;
}

std::vector<std::shared_ptr<void>> References::from_handles(const std::vector<wire::Handle>& handles,
                                                            PeerId from) {
  std::vector<std::shared_ptr<void>> references;
  references.reserve(handles.size());
  bool lost = false;
  try {
    for (const wire::Handle& handle : handles) {
      if (auto reference = from_handle(handle, from)) {
        references.push_back(std::move(*reference));
      } else {
        lost = true;
      }
    }
  } catch (...) {
    driver_->release_references(std::move(references));
    throw;
  }
  if (!lost) return references;
  driver_->release_references(std::move(references));  // gives the others back, which arrived
  throw Error(ErrorKind::kDisconnected,
              "a reference in this message was given up as lost when a connection broke; send it again");
}

void References::release(GlobalId fork) {
  driver_->change(
      [&](RRefTable& table, RRefTable::Effects& effects) { table.held().release(fork, effects); });
}

RRefTable::Counts References::counts() const {
  MutexLock lock(shared_->mutex);
  return shared_->table.counts();
}

bool References::settled() const {
  if (!driver_->idle()) return false;
  MutexLock lock(shared_->mutex);
  const auto counts = shared_->table.counts();
  return counts.pending_users == 0 && counts.pending_children == 0;
}

void References::delete_users() {
  std::vector<std::shared_ptr<void>> living;
  driver_->change(
      [&](RRefTable& table, RRefTable::Effects& effects) { living = table.held().release_all(effects); });
  for (const auto& user : living) std::static_pointer_cast<UserReference>(user)->detach();
}

void References::clear() {
  RRefTable::Effects effects;
  std::vector<std::shared_ptr<void>> living;
  {
    MutexLock lock(shared_->mutex);
    for (const auto& [fork, user] : shared_->table.held().all()) {
      if (auto alive = user.reference.lock()) living.push_back(std::move(alive));
    }
    shared_->table.clear(effects);
  }
  for (const auto& user : living) std::static_pointer_cast<UserReference>(user)->detach();
  // Calls that wait for a reference also hold it; they release it when it completes.
  const auto reason = std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "this worker was shut down before the value arrived"));
  for (const auto& kept : effects.released) {
    if (kept) std::static_pointer_cast<Reference>(kept)->abandon(reason);
  }
}

std::vector<RRefInfo> References::list() const {
  const auto backend = backend_.lock();
  if (!backend) return {};
  std::vector<Entry> entries = read_owned(*shared_);
  read_held(*shared_, entries);
  std::vector<RRefInfo> list = describe(entries, names_, *backend);
  std::ranges::stable_sort(list, std::greater(), &RRefInfo::age);
  return list;
}

std::vector<RRefInfo> References::list_owners() const {
  const auto backend = backend_.lock();
  return backend ? describe(read_owned(*shared_), names_, *backend) : std::vector<RRefInfo>();
}

}  // namespace torchspan::rpc
