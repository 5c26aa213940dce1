#include "net/stream/mailbox.h"

#include "net/stream/connection.h"

namespace torchspan::net {

Mailbox::Mailbox(Poller& poller) : poller_(&poller) {}
Mailbox::~Mailbox() = default;

void Mailbox::post(std::unique_ptr<ListeningSocket> listener) {
  MutexLock lock(mutex_);
  if (poller_ == nullptr) return;
  requests_.listeners.push_back(std::move(listener));
  announce();
}

void Mailbox::post(std::unique_ptr<Connection> connection) {
  MutexLock lock(mutex_);
  if (poller_ == nullptr) return;
  requests_.connections.push_back(std::move(connection));
  announce();
}

void Mailbox::post_review(std::uint64_t token) {
  MutexLock lock(mutex_);
  if (poller_ == nullptr) return;
  requests_.reviews.push_back(token);
  announce();
}

Mailbox::Requests Mailbox::take() {
  MutexLock lock(mutex_);
  pending_.store(false, std::memory_order_relaxed);
  return std::exchange(requests_, {});
}

Mailbox::Requests Mailbox::close() {
  MutexLock lock(mutex_);
  poller_ = nullptr;
  return std::exchange(requests_, {});
}

void Mailbox::announce() {
  if (!pending_.exchange(true, std::memory_order_release)) poller_->wake();
}

}  // namespace torchspan::net
