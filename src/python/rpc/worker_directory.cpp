#include "python/rpc/worker_directory.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdexcept>

namespace torchspan::python {

TorchWorker WorkerDirectory::worker_of(const rendezvous::Member& member) const {
  if (member.rank == membership_->self().rank) return self_;
  return {member.name, static_cast<std::int64_t>(member.rank)};
}

template <class Matches>
const TorchWorker& WorkerDirectory::find_if(const Matches& matches, const std::string& what) const {
  if (matches(self_)) return self_;
  MutexLock lock(mutex_);
  const bool may_change = membership_->open();
  if (!may_change) {
    const auto found = std::ranges::find_if(known_, matches);
    if (found != known_.end()) return *found;
  }
  std::vector<std::string> names;
  for (const TorchWorker& worker : all()) {
    names.push_back(worker.name_);
    if (!matches(worker)) continue;
    const auto same = std::ranges::find_if(
        known_, [&](const TorchWorker& one) { return one.id_ == worker.id_ && one.name_ == worker.name_; });
    return same != known_.end() ? *same : known_.emplace_back(worker);
  }
  throw std::runtime_error(fmt::format("torchspan: worker {} could not find destination {}; there are {}",
                                       self_.name_, what, fmt::join(names, ", ")));
}

const TorchWorker& WorkerDirectory::find(const std::string& name) const {
  return find_if([&](const TorchWorker& worker) { return worker.name_ == name; },
                 fmt::format("worker '{}'", name));
}

const TorchWorker& WorkerDirectory::find(torch::distributed::rpc::worker_id_t id) const {
  return find_if([&](const TorchWorker& worker) { return worker.id_ == id; }, fmt::format("id {}", id));
}

std::vector<TorchWorker> WorkerDirectory::all() const {
  std::vector<TorchWorker> workers;
  for (const rendezvous::Member& member : membership_->members()) {
    if (!membership_->open() || membership_->is_present(member.rank)) workers.push_back(worker_of(member));
  }
  return workers;
}

std::uint32_t WorkerDirectory::rank_of(const TorchWorker& worker) const {
  return static_cast<std::uint32_t>(worker.id_ == self_.id_ ? membership_->self().rank : worker.id_);
}

std::string WorkerDirectory::name_of(std::uint32_t rank) const {
  return membership_->member(static_cast<int>(rank)).name;
}

}  // namespace torchspan::python
