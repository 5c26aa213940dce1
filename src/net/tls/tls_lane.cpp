#include "net/tls/tls_lane.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "net/socket_limits.h"

namespace torchspan::net {
namespace {

/// Reads of one connection in a row, before those of other connections.
constexpr int kTlsReadRounds = 16;

/// The system of a peer acknowledges bytes that arrive within some tenths of a second, even if the peer is stopped.
constexpr std::uint32_t kUnacknowledgedMilliseconds = 1000;

/// Whether the peer's system has not acknowledged what was sent.
bool is_stalled(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_unacked != 0 &&
         info.tcpi_last_ack_recv >= kUnacknowledgedMilliseconds;
}

}  // namespace

void TlsLane::start(std::shared_ptr<TlsSession> session, bool connected) {
  session_ = std::move(session);
  stage_ = connected ? Stage::kTls : Stage::kConnecting;
}

std::optional<LaneHello> TlsLane::meet(const LaneHello& mine) {
  if (stage_ == Stage::kTls) {
    if (!session_->shake_hands()) return std::nullopt;
    stage_ = Stage::kHello;
    if (role_ == Role::kDialer) say(mine);
  }
  return greeting_.hear(*session_, mine);
}

void TlsLane::join(std::shared_ptr<TlsLink> whose, std::uint8_t number) {
  link = std::move(whose);
  number_ = number;
  stage_ = Stage::kOpen;
  session_->trust();
  if (first()) return;
  slot = link->channel()->add_lane(session_);
  pieces_.emplace(link->assembly());
}

Error TlsLane::timed_out() const {
  switch (stage_) {
    case Stage::kResolving:
      return Error(ErrorKind::kTimedOut,
                   fmt::format("the host name of '{}' was not found in time: does the name service answer "
                               "here (getent hosts)?",
                               peer_));
    case Stage::kConnecting:
      return Error(
          ErrorKind::kTimedOut,
          fmt::format("'{}' did not accept the connection in time: is that host up, does a firewall let "
                      "this port through, and do packets come back (ping each host from the other)?",
                      peer_));
    case Stage::kTls:
    case Stage::kHello:
      return handshake_timed_out();
    case Stage::kOpen:
      break;
  }
  if (link->channel()->state().closing) {
    return Error(
        ErrorKind::kDisconnected,
        fmt::format("this side closed the channel to '{}', which did not acknowledge it in time", peer_));
  }
  return Error(ErrorKind::kDisconnected,
               fmt::format("'{}' is gone: one of its connections ended without the others", peer_));
}

Error TlsLane::handshake_timed_out() const {
  // A connection that is established carries small packets. Without an answer to larger ones, they get lost.
  if (greeting_.heard_hello() || is_stalled(session_->socket())) {
    return Error(
        ErrorKind::kTimedOut,
        fmt::format("the connection with '{}' passes small packets only: {} KiB did not arrive in time. "
                    "A device between the hosts drops larger packets: lower the MTU of both hosts "
                    "(ip link set dev DEVICE mtu 1280), or set net.ipv4.tcp_mtu_probing=1 there; if the "
                    "hosts were cut off from each other just now, try again",
                    peer_, kProbeBytes >> 10));
  }
  return Error(ErrorKind::kTimedOut,
               fmt::format("'{}' did not finish the handshake in time: it is stopped, overloaded, or not "
                           "a worker",
                           peer_));
}

bool TlsLane::can_receive() const { return pieces_ ? pieces_->ready() : !(link && link->is_full()); }

bool TlsLane::receive(std::span<std::byte> scratch, Handler& handler) {
  last = {};
  return pieces_ ? receive_pieces(handler) : receive_frames(scratch, handler);
}

bool TlsLane::note(const TlsSession::Got& got) {
  last.heard |= got.heard;
  return !got.ended && got.broken == 0;
}

bool TlsLane::receive_frames(std::span<std::byte> scratch, Handler& handler) {
  std::array<iovec, kReceiveIovecs + 1> places;
  for (int round = 0; round < kTlsReadRounds; ++round) {
    if (!can_receive()) {
      last.waits = true;
      return true;
    }
    const std::size_t count = link->targets(std::span(places).first(kReceiveIovecs));
    std::size_t direct = 0;
    for (std::size_t i = 0; i < count; ++i) direct += places[i].iov_len;
    places[count] = {scratch.data(), scratch.size()};
    const TlsSession::Got got = session_->read(std::span(places).first(count + 1));
    const bool alive = note(got);
    const std::size_t in_place = std::min(got.size, direct);
    link->take(in_place, scratch.first(got.size - in_place), handler);
    if (!alive) return false;
    if (!got.more) return true;
  }
  last.more = true;
  return true;
}

bool TlsLane::receive_pieces(Handler& handler) {
  std::array<iovec, kReceiveIovecs + 1> places;
  for (int round = 0; round < kTlsReadRounds; ++round) {
    if (!pieces_->ready()) {
      last.waits = true;
      return true;
    }
    TlsSession::Got got;
    try {
      const std::size_t count = pieces_->targets(places);
      got = session_->read(std::span(places).first(count));
    } catch (const Error& error) {
      throw Error(error.kind(), fmt::format("'{}' is cut off: {}", link->channel()->peer(), error.message()));
    }
    const bool alive = note(got);
    pieces_->received(got.size);
    if (got.size != 0) link->deliver_assembled(handler);
    if (!alive) return false;
    if (!got.more) return true;
  }
  last.more = true;
  return true;
}

}  // namespace torchspan::net
