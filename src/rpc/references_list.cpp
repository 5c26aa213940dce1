// The books on references, for people.
#include <algorithm>
#include <fmt/format.h>

#include "rpc/call_table.h"
#include "rpc/control.h"
#include "rpc/references.h"

namespace torchspan::rpc {
namespace {

/// Entries that are read at one time under the lock.
constexpr std::size_t kPortion = 256;
/// Names of source files that are kept: more than a program has.
constexpr std::size_t kFiles = 1024;
constexpr std::size_t kLongestFile = 256;

std::string text(GlobalId id) { return std::to_string(id.worker) + ":" + std::to_string(id.local); }

/// Calls `add` for the next entries of a map after `last`; false when these were all.
template <class Map, class Add>
bool read_portion(const Map& map, std::optional<GlobalId>& last, Add&& add) {
  auto it = last ? map.upper_bound(*last) : map.begin();
  for (std::size_t i = 0; i < kPortion && it != map.end(); ++i, ++it) {
    add(it->first, it->second);
    last = it->first;
  }
  return it != map.end();
}

}  // namespace

Bytes encode_site(const SourceLocation& site) {
  if (site.line() == 0) return {};
  ByteWriter writer;
  writer.put(static_cast<std::uint32_t>(site.line()));
  const std::string_view file = file_of(site.file_name());
  writer.put_bytes(std::as_bytes(std::span(file.data(), std::min(file.size(), kLongestFile))));
  return writer.take();
}

void References::read_site(BytesView site, Origin& origin) {
  if (site.empty()) return;
  ByteReader reader(site);
  origin.line = reader.get<std::uint32_t>();
  if (reader.left() > kLongestFile)
    throw Error(ErrorKind::kInvalid, "a creation's place in the program has too long a file name");
  const BytesView name = reader.get_bytes(reader.left());
  std::string file(name.size(), '\0');
  std::ranges::transform(name, file.begin(), [](std::byte byte) { return static_cast<char>(byte); });
  const auto known = files_.find(file);
  if (known != files_.end()) {
    origin.file = known->c_str();
  } else if (files_.size() < kFiles) {
    origin.file = files_.insert(std::move(file)).first->c_str();
  } else {
    origin.line = 0;
  }
}

void References::name_type(std::uint64_t tag, const std::string& name) {
  MutexLock lock(mutex_);
  if (types_.contains(tag) || wire::digest(name) != tag) return;
  types_.emplace(tag, name);
}

bool References::knows_type(std::uint64_t tag) const {
  MutexLock lock(mutex_);
  return types_.contains(tag);
}

/// What is read of an entry under the lock.
struct References::Entry {
  RRefInfo::Role role = RRefInfo::Role::kOwner;
  GlobalId value = {};
  GlobalId fork = {};
  std::uint32_t owner = 0;
  std::vector<std::uint32_t> holders = {};
  Origin origin = {};
  std::uint64_t tag = 0;
  KnownSize size = {};
  bool there = true;
  std::shared_ptr<void> pinned = {};  ///< its end takes the lock

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

std::vector<References::Entry> References::read_owned() const {
  std::vector<Entry> entries;
  std::optional<GlobalId> last;
  for (bool more = true; more;) {
    MutexLock lock(mutex_);
    const std::uint32_t self = table_.self().rank;
    more = read_portion(table_.owned().all(), last, [&](GlobalId value, const OwnedValues::Owned& owned) {
      Entry entry{.role = RRefInfo::Role::kOwner, .value = value, .owner = self, .there = owned.came};
      for (const auto& [fork, holder] : owned.forks) entry.holders.push_back(holder.rank);
      if (owned.owner)
        entry.read(static_cast<const OwnerReference&>(*std::static_pointer_cast<Reference>(owned.owner)));
      entries.push_back(std::move(entry));
    });
  }
  return entries;
}

void References::read_held(std::vector<Entry>& entries) const {
  std::optional<GlobalId> last;
  for (bool more = true; more;) {
    MutexLock lock(mutex_);
    const HeldReferences& held = table_.held();
    more = read_portion(held.all(), last, [&](GlobalId fork, const HeldReferences::User& user) {
      auto alive = user.reference.lock();
      if (!alive) return;  // it ends at this moment
      Entry entry{.role = held.pending(fork) ? RRefInfo::Role::kPendingFork : RRefInfo::Role::kUser,
                  .fork = fork};
      entry.read(static_cast<const UserReference&>(*std::static_pointer_cast<Reference>(alive)));
      entry.pinned = std::move(alive);
      entries.push_back(std::move(entry));
    });
  }
  last.reset();
  for (bool more = true; more;) {
    MutexLock lock(mutex_);
    more =
        read_portion(table_.held().children(), last, [&](GlobalId fork, const HeldReferences::Child& child) {
          Entry entry{.role = RRefInfo::Role::kPendingChild, .fork = fork, .holders = {child.to.rank}};
          entry.read(static_cast<const UserReference&>(*std::static_pointer_cast<Reference>(child.parent)));
          entries.push_back(std::move(entry));
        });
  }
}

std::vector<RRefInfo> References::describe(const std::vector<Entry>& entries) const {
  const auto endpoint = endpoint_.lock();
  if (!endpoint) return {};
  std::unordered_map<std::uint64_t, std::string> types;
  {
    MutexLock lock(mutex_);
    types = types_;
  }
  const TimePoint now = endpoint->runtime().executor.now();
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
    info.creator = endpoint->name_of(entry.value.worker);
    info.owner = endpoint->name_of(entry.owner);
    const bool copied = entry.role == RRefInfo::Role::kUser || entry.role == RRefInfo::Role::kPendingFork;
    if (copied && origin.copied) info.from = endpoint->name_of(origin.from);
    for (const std::uint32_t holder : entry.holders) ++info.holders[endpoint->name_of(holder)];
    info.there = entry.there;
  }
  return list;
}

std::vector<std::string> References::outstanding() const {
  std::map<std::pair<std::uint32_t, std::string_view>, std::size_t> letters;
  {
    MutexLock lock(mutex_);
    for (const auto& [letter, count] : in_flight_)
      letters[{letter.first.rank, name_of(letter.second)}] += count;
    for (const auto& [peer, again] : audits_) ++letters[{peer.rank, ForkAudit::kName}];
  }
  const auto endpoint = endpoint_.lock();
  std::vector<std::string> lines;
  for (const auto& [letter, count] : letters) {
    const auto& [rank, name] = letter;
    lines.push_back(fmt::format(
        "no answer to {} of '{}' to {}", count, name,
        endpoint ? fmt::format("worker '{}'", endpoint->name_of(rank)) : fmt::format("rank {}", rank)));
  }
  return lines;
}

std::vector<RRefInfo> References::list_owners() const { return describe(read_owned()); }

std::vector<RRefInfo> References::list() const {
  std::vector<Entry> entries = read_owned();
  read_held(entries);
  std::vector<RRefInfo> list = describe(entries);
  std::ranges::stable_sort(list, std::greater(), &RRefInfo::age);
  return list;
}

}  // namespace torchspan::rpc
