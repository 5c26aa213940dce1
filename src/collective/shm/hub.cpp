#include "collective/shm/hub.h"

#include <cerrno>
#include <sys/socket.h>

namespace torchspan::collective::shm {

void Hub::note_gone(int hub_rank, const std::string& how) {
  std::vector<Listener> listeners;
  {
    MutexLock lock(mutex_);
    auto& gone = gone_[static_cast<std::size_t>(hub_rank)];
    if (gone) return;
    gone = how;
    std::erase_if(listeners_, [](const Listener& listener) { return listener.owner.expired(); });
    listeners = listeners_;
  }
  for (const Listener& listener : listeners) {
    if (const auto owner = listener.owner.lock()) listener.callback();
  }
}

void Hub::note_gone_by_epoch(std::uint64_t epoch, const std::string& how) {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != self_ && person(rank).epoch == epoch) note_gone(rank, how);
  }
}

std::optional<std::string> Hub::gone(int hub_rank) {
  const auto index = static_cast<std::size_t>(hub_rank);
  bool ended = false;
  if (ends_[index]) {
    char byte = 0;
    // Nobody says anything here: whatever is to be read is the end.
    const ssize_t got = ::recv(ends_[index].get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  }
  MutexLock lock(mutex_);
  if (ended && !gone_[index]) gone_[index] = "its process ended, or let go of its groups";
  return gone_[index];
}

void Hub::retire(const Arena::Stretch& stretch, std::function<bool()> unseen) {
  {
    MutexLock lock(retired_mutex_);
    retired_.push_back({stretch, std::move(unseen)});
  }
  reclaim();
}

void Hub::reclaim() {
  MutexLock lock(retired_mutex_);
  std::erase_if(retired_, [this](const Retired& retired) {
    if (!retired.unseen()) return false;
    own_->release(retired.stretch);
    return true;
  });
}

void Hub::on_gone(const std::weak_ptr<void>& owner, std::function<void()> callback) {
  MutexLock lock(mutex_);
  listeners_.push_back({owner, std::move(callback)});
}

}  // namespace torchspan::collective::shm
