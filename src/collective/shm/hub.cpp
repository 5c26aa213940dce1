#include "collective/shm/hub.h"

#include <cerrno>
#include <sys/socket.h>

namespace torchspan::collective::shm {

void Hub::note_gone(std::uint64_t epoch, const std::string& how) {
  bool news = false;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == self_ || person(rank).epoch != epoch) continue;
    MutexLock lock(mutex_);
    auto& gone = gone_[static_cast<std::size_t>(rank)];
    news = !gone;
    if (news) gone = how;
  }
  if (!news) return;
  for (const auto& listener : listeners()) listener->somebody_gone();
}

void Hub::world_ended(const Error& reason) {
  for (const auto& listener : listeners()) listener->world_ended(reason);
}

void Hub::world_closing() {
  for (const auto& listener : listeners()) listener->world_closing();
}

std::vector<std::shared_ptr<HubListener>> Hub::listeners() {
  std::vector<std::shared_ptr<HubListener>> living;
  MutexLock lock(mutex_);
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  for (const auto& listener : listeners_) {
    if (auto one = listener.lock()) living.push_back(std::move(one));
  }
  return living;
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
  if (!gone_[index]) gone_[index] = world_->gone(person(hub_rank).epoch);
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

void Hub::add(const std::weak_ptr<HubListener>& listener) {
  {
    MutexLock lock(mutex_);
    listeners_.push_back(listener);
  }
  const auto told = listener.lock();
  const auto ended = world_->ended();
  if (told && ended) told->world_ended(*ended);
}

}  // namespace torchspan::collective::shm
