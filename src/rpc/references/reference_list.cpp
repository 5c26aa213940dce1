#include "rpc/references/reference_list.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "rpc/calls/call_table.h"

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
                               Endpoint& endpoint) {
  const auto types = names.types();
  const TimePoint now = endpoint.runtime().executor.now();
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
    info.creator = endpoint.name_of(entry.value.worker);
    info.owner = endpoint.name_of(entry.owner);
    const bool copied = entry.role == RRefInfo::Role::kUser || entry.role == RRefInfo::Role::kPendingFork;
    if (copied && origin.copied) info.from = endpoint.name_of(origin.from);
    for (const std::uint32_t holder : entry.holders) ++info.holders[endpoint.name_of(holder)];
    info.there = entry.there;
  }
  return list;
}

}  // namespace

std::vector<RRefInfo> list_owned_values(const SharedRRefTable& shared, const ProgramNames& names,
                                        Endpoint& endpoint) {
  return describe(read_owned(shared), names, endpoint);
}

std::vector<RRefInfo> list_references(const SharedRRefTable& shared, const ProgramNames& names,
                                      Endpoint& endpoint) {
  std::vector<Entry> entries = read_owned(shared);
  read_held(shared, entries);
  std::vector<RRefInfo> list = describe(entries, names, endpoint);
  std::ranges::stable_sort(list, std::greater(), &RRefInfo::age);
  return list;
}

}  // namespace torchspan::rpc
