#include "collective/shm/peer_memory.h"

#include <cerrno>
#include <sys/socket.h>

#include "collective/shm/op_queue.h"

namespace torchspan::collective::shm {

void PeerMemory::note_departed(std::uint64_t instance, const std::string& how) {
  bool is_first = false;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == self_ || peer(rank).instance != instance) continue;
    MutexLock lock(mutex_);
    auto& departed = departed_[static_cast<std::size_t>(rank)];
    is_first = !departed;
    if (is_first) departed = how;
  }
  if (!is_first) return;
  for (const auto& listener : listeners()) listener->rank_departed();
}

void PeerMemory::world_ended(const Error& reason) {
  for (const auto& listener : listeners()) listener->world_ended(reason);
}

void PeerMemory::world_closing() {
  for (const auto& listener : listeners()) listener->world_closing();
}

std::vector<std::shared_ptr<OpQueue>> PeerMemory::listeners() {
  std::vector<std::shared_ptr<OpQueue>> living;
  MutexLock lock(mutex_);
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  for (const auto& listener : listeners_) {
    if (auto one = listener.lock()) living.push_back(std::move(one));
  }
  return living;
}

std::optional<std::string> PeerMemory::departed(int peer_rank) {
  const auto index = static_cast<std::size_t>(peer_rank);
  bool ended = false;
  if (ends_[index]) {
    char byte = 0;
    // Peers send nothing on this socket: it becomes readable only at its end.
    const ssize_t got = ::recv(ends_[index].get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  }
  MutexLock lock(mutex_);
  if (!departed_[index]) departed_[index] = world_->departed(peer(peer_rank).instance);
  if (ended && !departed_[index]) departed_[index] = "its process ended or dropped its groups";
  return departed_[index];
}

std::optional<WorldLink::DepartedRank> PeerMemory::await_first_departed(
    const std::vector<int>& peer_ranks) const {
  std::vector<std::uint64_t> instances;
  for (const int peer_rank : peer_ranks) instances.push_back(peer(peer_rank).instance);
  return world_->await_first_departed(instances);
}

void PeerMemory::retire(const Arena::Stretch& stretch, std::function<bool()> unseen) {
  {
    MutexLock lock(retired_mutex_);
    retired_.push_back({stretch, std::move(unseen)});
  }
  reclaim();
}

void PeerMemory::reclaim() {
  MutexLock lock(retired_mutex_);
  std::erase_if(retired_, [this](const Retired& retired) {
    if (!retired.unseen()) return false;
    own_->release(retired.stretch);
    return true;
  });
}

void PeerMemory::add(const std::weak_ptr<OpQueue>& listener) {
  {
    MutexLock lock(mutex_);
    std::erase_if(listeners_, [](const auto& one) { return one.expired(); });
    listeners_.push_back(listener);
  }
  const auto listening = listener.lock();
  const auto ended = world_->ended();
  if (listening && ended) listening->world_ended(*ended);
}

}  // namespace torchspan::collective::shm
