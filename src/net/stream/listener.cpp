#include "net/stream/listener.h"

#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/socket.h>

#include "net/handshake.h"
#include "net/stream/socket.h"

namespace torchspan::net {

Listener::Listener(const DriverContext& driver, TakeConnection take)
    : driver_(driver), take_(std::move(take)) {}

void Listener::add(std::unique_ptr<ListeningSocket> socket) {
  const std::uint64_t token = driver_.tokens.next();
  Socket& listening = sockets_[token];
  listening.socket = std::move(socket);
  watch(token, listening, true);
}

bool Listener::serve(std::uint64_t token) {
  const auto found = sockets_.find(token);
  if (found == sockets_.end()) return false;
  accept_at(token, found->second);
  return true;
}

bool Listener::end_pause(std::uint64_t token) {
  const auto found = sockets_.find(token);
  if (found == sockets_.end()) return false;
  found->second.paused = false;
  resume();
  return true;
}

void Listener::accept_at(std::uint64_t token, Socket& listening) {
  for (int i = 0; i < kMaxAcceptsPerPoll; ++i) {
    if (is_full()) {
      shorten_oldest_handshake();
      return watch(token, listening, false);
    }
    Descriptor socket = accept_connection(listening.socket->get());
    if (socket) {
      take_(std::move(socket), listening.socket->address());
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    // A peer that hung up before it was accepted does no harm. After any other error, retrying at once would spin.
    if (errno != EINTR && errno != ECONNABORTED && errno != EPROTO) return pause(token, listening, errno);
  }
}

void Listener::watch(std::uint64_t token, Socket& listening, bool on) {
  if (listening.watched == on) return;
  listening.watched = on;
  const int socket = listening.socket->get();
  on ? driver_.poller.add(socket, token, false) : driver_.poller.remove(socket);
}

void Listener::pause(std::uint64_t token, Socket& listening, int reason) {
  watch(token, listening, false);
  listening.paused = true;
  driver_.timers.set(token, driver_.executor.now() + kPauseWithoutDescriptors);
  driver_.handler.on_refused(
      listening.socket->address().text,
      Error(
          ErrorKind::kOverloaded,
          fmt::format("no connection can be accepted for now: {}; raise the limit of open files (ulimit -n)",
                      std::strerror(reason))));
}

void Listener::shorten_oldest_handshake() {
  if (unauthenticated_.empty()) return;
  const auto& [token, arrived] = *unauthenticated_.begin();
  const auto timeout = driver_.timers.of(token);
  const TimePoint due = arrived + kMinHandshakeTimeout;
  if (timeout && due < *timeout) driver_.timers.set(token, due);
}

void Listener::add_unauthenticated(std::uint64_t token) {
  unauthenticated_.emplace(token, driver_.executor.now());
}

void Listener::remove_unauthenticated(std::uint64_t token) {
  if (unauthenticated_.erase(token) != 0) resume();
}

void Listener::resume() {
  if (is_full()) return;
  for (auto& [token, listening] : sockets_) {
    if (!listening.paused) watch(token, listening, true);
  }
}

}  // namespace torchspan::net
