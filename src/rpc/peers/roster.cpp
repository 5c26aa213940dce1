#include "rpc/peers/roster.h"

#include <fmt/format.h>

namespace torchspan::rpc {

void Roster::set(WorkerInfo worker) {
  MutexLock lock(mutex_);
  forget_name(worker.rank);
  names_[worker.rank] = worker.name;
  ranks_[worker.name] = worker.rank;
  present_[worker.rank] = std::move(worker);
}

void Roster::remove(std::uint32_t rank) {
  MutexLock lock(mutex_);
  auto found = present_.find(rank);
  if (found == present_.end()) return;
  forget_name(rank);
  present_.erase(found);
}

/// Unless somebody else has the name by now.
void Roster::forget_name(std::uint32_t rank) {
  auto found = present_.find(rank);
  if (found == present_.end()) return;
  auto named = ranks_.find(found->second.name);
  if (named != ranks_.end() && named->second == rank) ranks_.erase(named);
}

void Roster::clear() {
  MutexLock lock(mutex_);
  present_.clear();
  ranks_.clear();
}

std::vector<WorkerInfo> Roster::all() const {
  std::vector<WorkerInfo> workers;
  MutexLock lock(mutex_);
  workers.reserve(present_.size());
  for (const auto& [rank, worker] : present_) workers.push_back(worker);
  return workers;
}

std::size_t Roster::size() const {
  MutexLock lock(mutex_);
  return present_.size();
}

std::uint32_t Roster::resolve(const Destination& to) const {
  MutexLock lock(mutex_);
  if (to.rank()) {
    const auto rank = static_cast<std::uint32_t>(*to.rank());
    if (*to.rank() == std::int64_t{rank} && present_.contains(rank)) return rank;
  } else if (auto found = ranks_.find(to.name()); found != ranks_.end()) {
    return found->second;
  }
  throw_unknown(to);
}

WorkerInfo Roster::info(const Destination& of) const {
  const std::uint32_t rank = resolve(of);
  MutexLock lock(mutex_);
  auto found = present_.find(rank);
  if (found == present_.end()) throw_unknown(of);
  return found->second;
}

std::string Roster::name(std::uint32_t rank) const {
  MutexLock lock(mutex_);
  auto found = names_.find(rank);
  return found == names_.end() ? fmt::format("rank {}", rank) : found->second;
}

void Roster::throw_unknown(const Destination& to) const {
  const std::string wanted =
      to.rank() ? fmt::format("rank {}", *to.rank()) : fmt::format("worker '{}'", to.name());
  std::string known;
  for (const auto& [rank, worker] : present_) known += fmt::format(" '{}' ({})", worker.name, rank);
  throw Error(ErrorKind::kInvalid, fmt::format("there is no {} in this world; there are{}", wanted, known));
}

}  // namespace torchspan::rpc
