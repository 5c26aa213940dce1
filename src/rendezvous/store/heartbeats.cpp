#include "rendezvous/store/heartbeats.h"

#include <fmt/format.h>

#include "core/api/saturated_time.h"

namespace torchspan::rendezvous {

std::string silence_text(Duration silence) {
  return fmt::format(
      "silent for {:.1f} s (no heartbeat); its process is stopped, or its host or the network is down",
      to_seconds(silence));
}

void Heartbeats::watch(std::uint64_t connection, TimePoint now) {
  forget(connection);
  peers_[connection] = {now, std::nullopt};
  to_ask_.emplace(now, connection);
}

void Heartbeats::forget(std::uint64_t connection) {
  const auto found = peers_.find(connection);
  if (found == peers_.end()) return;
  to_ask_.erase({found->second.ask_at, connection});
  if (found->second.asked_since) unanswered_.erase({*found->second.asked_since, connection});
  peers_.erase(found);
}

void Heartbeats::heard(std::uint64_t connection) {
  const auto found = peers_.find(connection);
  if (found == peers_.end() || !found->second.asked_since) return;
  unanswered_.erase({*found->second.asked_since, connection});
  found->second.asked_since.reset();
}

Heartbeats::Due Heartbeats::tick(TimePoint now) {
  Due due;
  while (!unanswered_.empty() && now - unanswered_.begin()->first >= options_.dead_after) {
    due.dead.push_back(unanswered_.begin()->second);
    forget(due.dead.back());
  }
  while (!to_ask_.empty() && to_ask_.begin()->first <= now) {
    const std::uint64_t connection = to_ask_.begin()->second;
    to_ask_.erase(to_ask_.begin());
    due.ask.push_back(connection);
    Peer& peer = peers_.at(connection);
    peer.ask_at = now + options_.interval;
    to_ask_.emplace(peer.ask_at, connection);
    if (peer.asked_since) continue;
    peer.asked_since = now;
    unanswered_.emplace(now, connection);
  }
  return due;
}

Deadline Heartbeats::next_deadline() const {
  Deadline next;
  if (!to_ask_.empty()) next = Deadline(to_ask_.begin()->first);
  if (!unanswered_.empty())
    next = earlier(next, deadline_after(unanswered_.begin()->first, options_.dead_after));
  return next;
}

}  // namespace torchspan::rendezvous
