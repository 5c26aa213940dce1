#include "autograd/messages/sending.h"

#include <algorithm>
#include <fmt/format.h>
#include <optional>

namespace torchspan::autograd {

Worker WeakWorker::require() const {
  auto backend = backend_.lock();
  if (!backend) throw Error(ErrorKind::kCancelled, fmt::format("worker '{}' was shut down", name_));
  return Worker(std::move(backend));
}

void Outbox::close() {
  std::map<std::uint32_t, Queue> queues;  // destroyed after the lock is released
  MutexLock lock(mutex_);
  closed_ = true;
  queues.swap(queues_);
}

std::vector<std::string> Outbox::waiting() const {
  std::vector<std::string> lines;
  const auto backend = backend_.lock();
  if (!backend) return lines;
  MutexLock lock(mutex_);
  for (const auto& [to, queue] : queues_) {
    if (queue.queue.empty()) continue;
    lines.push_back(fmt::format("{} messages to worker '{}' are queued: {}", queue.queue.size(),
                                backend->name_of(to), queue.why));
  }
  return lines;
}

bool Outbox::join_queue(const QueuedMessagePtr& queued) {
  MutexLock lock(mutex_);
  if (closed_) return true;
  const auto found = queues_.find(queued->to);
  if (found == queues_.end() || found->second.queue.empty()) return false;
  found->second.queue.push_back(queued);
  return true;
}

bool Outbox::takes_back(const QueuedMessagePtr& queued, const std::exception_ptr& error) {
  std::optional<Error> full;
  if (error) full = to_error(error);
  if (full && full->kind() != ErrorKind::kOverloaded) return false;
  const std::uint32_t to = queued->to;
  {
    MutexLock lock(mutex_);
    if (full) {
      if (closed_) return true;
      Queue& queue = queues_[to];
      queue.queue.push_back(queued);
      ++queue.refusals;
      queue.most = 1;
      queue.why = full->message();
      pause(to, queue);
      return true;
    }
    const auto found = queues_.find(to);
    if (found == queues_.end()) return false;
    found->second.pause = kFirstPause;
    if (found->second.queue.empty()) return false;
  }
  // Sends two messages for each answer, so that the number in flight grows until a limit is reached again.
  const auto backend = backend_.lock();
  const auto continuations = backend ? backend->continuations().lock() : nullptr;
  if (continuations) continuations->post([self = shared_from_this(), to] { self->send_some(to, 2); });
  return false;
}

void Outbox::pause(std::uint32_t to, Queue& queue) {
  const auto backend = backend_.lock();
  if (!backend || queue.pausing) return;
  queue.pausing = true;
  backend->after(queue.pause, [weak = weak_from_this(), to] {
    if (const auto self = weak.lock()) self->pause_over(to);
  });
  queue.pause = std::min(2 * queue.pause, kLongestPause);
}

void Outbox::pause_over(std::uint32_t to) {
  std::size_t most = 0;
  {
    MutexLock lock(mutex_);
    const auto found = queues_.find(to);
    if (found == queues_.end()) return;
    found->second.pausing = false;
    most = found->second.most;
    found->second.most *= 2;
  }
  send_some(to, most);
  MutexLock lock(mutex_);
  const auto found = queues_.find(to);
  if (found != queues_.end() && !found->second.queue.empty()) pause(to, found->second);
}

/// Stops at the first refusal.
void Outbox::send_some(std::uint32_t to, std::size_t most) {
  std::optional<std::size_t> refusals;
  for (; most > 0; --most) {
    QueuedMessagePtr queued;
    {
      MutexLock lock(mutex_);
      const auto found = queues_.find(to);
      if (found == queues_.end() || found->second.queue.empty()) return;
      Queue& queue = found->second;
      if (queue.refusals != refusals.value_or(queue.refusals)) return;
      refusals = queue.refusals;
      queued = std::move(queue.queue.front());
      queue.queue.pop_front();
    }
    queued->send(queued, *this);
  }
}

}  // namespace torchspan::autograd
