#include "rendezvous/store/heartbeats.h"

#include <fmt/format.h>

namespace torchspan::rendezvous {

std::string silence_text(Duration silence) {
  return fmt::format(
      "silent for {:.1f} s (no heartbeat); its process is stopped, or its host or the network is down",
      to_seconds(silence));
}

void Heartbeats::heard(std::uint64_t connection) {
  const auto found = peers_.find(connection);
  if (found != peers_.end()) found->second.asked_since.reset();
}

Heartbeats::Due Heartbeats::tick(TimePoint now) {
  Due due;
  for (auto& [connection, peer] : peers_) {
    if (peer.asked_since && now - *peer.asked_since >= options_.dead_after) {
      due.dead.push_back(connection);
    } else if (now >= peer.ask_at) {
      due.ask.push_back(connection);
      peer.ask_at = now + options_.interval;
      if (!peer.asked_since) peer.asked_since = now;
    }
  }
  for (const std::uint64_t connection : due.dead) peers_.erase(connection);
  return due;
}

Deadline Heartbeats::next_deadline() const {
  Deadline next;
  for (const auto& [connection, peer] : peers_) {
    next = earlier(next, Deadline(peer.ask_at));
    if (peer.asked_since) next = earlier(next, Deadline(*peer.asked_since + options_.dead_after));
  }
  return next;
}

}  // namespace torchspan::rendezvous
