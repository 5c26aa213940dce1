#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/socket.h>

#include "net/socket_limits.h"
#include "net/tls/tls_transport.h"

/// How TlsTransport takes calls.
namespace torchspan::net {

void TlsTransport::accept_from(std::uint64_t token, Listener& listener) {
  for (int i = 0; i < kMaxAcceptsPerPoll; ++i) {
    if (unauthenticated_.size() >= options_.max_unauthenticated) {
      shorten_handshakes();
      return watch(token, listener, false);
    }
    Descriptor socket = accept_caller(listener.socket->get());
    if (socket) {
      welcome(std::move(socket), listener);
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    // A caller that hung up meanwhile is no trouble; anything else is waited out instead of spun on.
    if (errno != EINTR && errno != ECONNABORTED && errno != EPROTO) return pause(token, listener, errno);
  }
}

void TlsTransport::welcome(Descriptor socket, const Listener& listener) {
  std::string peer = name_accepted(socket.get(), listener.socket->address());
  std::shared_ptr<TlsSession> session;
  try {
    session = std::make_shared<TlsSession>(
        context_, std::move(socket), TlsSession::Start{.role = Role::kListener, .peer = peer, .host = {}});
  } catch (const Error& error) {
    return handler_.on_refused(peer, error);
  }
  TlsLane& lane = add_lane(Role::kListener, std::move(peer), 0, nullptr);
  lane.start(std::move(session), true);
  unauthenticated_.emplace(lane.token(), now_);
  watch(lane, false);
}

void TlsTransport::watch(std::uint64_t token, Listener& listener, bool on) {
  if (listener.watched == on) return;
  listener.watched = on;
  on ? poller_->add(listener.socket->get(), token, false) : poller_->remove(listener.socket->get());
}

void TlsTransport::pause(std::uint64_t token, Listener& listener, int reason) {
  watch(token, listener, false);
  listener.resume = executor_.now() + kPauseWithoutDescriptors;
  timers_.emplace(*listener.resume, token);
  handler_.on_refused(listener.socket->address().text,
                      Error(ErrorKind::kOverloaded,
                            fmt::format("callers have to wait: {}; raise the limit of open files (ulimit -n)",
                                        std::strerror(reason))));
}

void TlsTransport::shorten_handshakes() {
  if (unauthenticated_.empty()) return;
  const auto& [token, arrived] = *unauthenticated_.begin();
  TlsLane& first = *lanes_.at(token);
  const TimePoint due = arrived + kLeastPatience;
  if (first.timer && due < *first.timer) set_timer(first, due);
}

void TlsTransport::resume_listeners() {
  if (unauthenticated_.size() >= options_.max_unauthenticated) return;
  for (auto& [token, listener] : listeners_) {
    if (!listener.resume) watch(token, listener, true);
  }
}

}  // namespace torchspan::net
