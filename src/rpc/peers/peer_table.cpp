#include "rpc/peers/peer_table.h"

#include <fmt/format.h>
#include <utility>

#include "core/api/throw_invalid.h"

namespace torchspan::rpc {

void PeerTable::add(Peer peer) {
  MutexLock lock(mutex_);
  const std::uint32_t rank = peer.info.rank;
  if (const auto before = entries_.find(rank); before != entries_.end()) release_name(before->second);
  ranks_[peer.info.name] = rank;
  const auto protocol = common_protocol(wire_, peer.wire);
  entries_[rank] = Entry{std::move(peer), std::nullopt, true, protocol};
}

bool PeerTable::depart(const Peer& peer, const Error& reason) {
  MutexLock lock(mutex_);
  const auto found = entries_.find(peer.info.rank);
  if (found == entries_.end() || found->second.departed || found->second.peer.instance != peer.instance)
    return false;
  found->second.departed = reason;
  return true;
}

void PeerTable::forget(std::uint32_t rank) {
  MutexLock lock(mutex_);
  const auto found = entries_.find(rank);
  if (found == entries_.end()) return;
  release_name(found->second);
  found->second.member = false;
}

/// Frees the name, unless another rank has it by now.
void PeerTable::release_name(const Entry& entry) {
  if (!entry.member) return;
  const auto named = ranks_.find(entry.peer.info.name);
  if (named != ranks_.end() && named->second == entry.peer.info.rank) ranks_.erase(named);
}

void PeerTable::begin(Peer self) {
  {
    MutexLock lock(mutex_);
    entries_.clear();
    ranks_.clear();
    wire_ = self.wire;
  }
  add(std::move(self));
}

bool PeerTable::knows(const Peer& peer) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(peer.info.rank);
  return found != entries_.end() && found->second.peer.instance == peer.instance;
}

bool PeerTable::is_present(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(rank);
  return found != entries_.end() && !found->second.departed;
}

std::optional<Peer> PeerTable::find_present(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(rank);
  if (found == entries_.end() || found->second.departed) return std::nullopt;
  return found->second.peer;
}

Peer PeerTable::present(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(rank);
  if (found == entries_.end()) throw_invalid("there is no rank {} in this world", rank);
  if (found->second.departed) throw Error(*found->second.departed);
  return found->second.peer;
}

std::vector<Peer> PeerTable::all_present() const {
  std::vector<Peer> peers;
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : entries_) {
    if (!entry.departed) peers.push_back(entry.peer);
  }
  return peers;
}

std::vector<WorkerInfo> PeerTable::members() const {
  std::vector<WorkerInfo> workers;
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : entries_) {
    if (entry.member) workers.push_back(entry.peer.info);
  }
  return workers;
}

std::uint32_t PeerTable::resolve(const Destination& to) const {
  MutexLock lock(mutex_);
  return find(to)->first;
}

WorkerInfo PeerTable::info(const Destination& of) const {
  MutexLock lock(mutex_);
  return find(of)->second.peer.info;
}

PeerTable::Entries::const_iterator PeerTable::find(const Destination& of) const {
  auto found = entries_.end();
  if (of.rank()) {
    const auto rank = static_cast<std::uint32_t>(*of.rank());
    if (*of.rank() == std::int64_t{rank}) found = entries_.find(rank);
  } else if (const auto named = ranks_.find(of.name()); named != ranks_.end()) {
    found = entries_.find(named->second);
  }
  if (found != entries_.end() && found->second.member) return found;
  const std::string wanted =
      of.rank() ? fmt::format("rank {}", *of.rank()) : fmt::format("worker '{}'", of.name());
  std::string known;
  for (const auto& [rank, entry] : entries_) {
    if (entry.member) known += fmt::format(" '{}' ({})", entry.peer.info.name, rank);
  }
  throw_invalid("there is no {} in this world; there are{}", wanted, known);
}

Protocol PeerTable::protocol(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(rank);
  if (found == entries_.end()) return {wire_.newest, 0};
  if (found->second.protocol) return *found->second.protocol;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format(
          "worker '{}' (rank {}) speaks {} of the wire format, this worker speaks {}: install the same "
          "release of TorchSpan on all hosts, or two neighboring ones",
          found->second.peer.info.name, rank, describe_versions(found->second.peer.wire),
          describe_versions(wire_)));
}

std::string PeerTable::name(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(rank);
  return found == entries_.end() ? fmt::format("rank {}", rank) : found->second.peer.info.name;
}

}  // namespace torchspan::rpc
