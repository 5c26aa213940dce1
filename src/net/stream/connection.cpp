#include "net/stream/connection.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "net/channel_errors.h"
#include "net/stream/socket.h"

namespace torchspan::net {
namespace {

/// Reads of one connection in a row, before those of other connections.
constexpr int kReadRounds = 16;
/// Bytes of one lane in a row, as multiples of the ring's capacity.
constexpr std::size_t kLaneRounds = 4;

HandshakeOptions handshake_options(const TransportOptions& options, std::string peer, bool shares) {
  HandshakeOptions handshake{.secret = options.secret, .peer = std::move(peer)};
  handshake.features = shares ? kSharesMemory : 0;
  draw_nonce(handshake.nonce);
  return handshake;
}

}  // namespace

Connection::Connection(Start start, const TransportOptions& options)
    : linger(options.linger),
      socket_(std::move(start.socket)),
      channel_(std::move(start.channel)),
      token_(start.token),
      dial_(std::move(start.dial)),
      dial_error_(std::move(start.dial_error)),
      stage_(start.connected ? Stage::kHandshake : Stage::kConnecting),
      handshake_(dial_ ? Role::kDialer : Role::kListener,
                 handshake_options(options, channel_->peer(), start.lane != nullptr)),
      lane_(std::move(start.lane)),
      parser_(limits_of(options), options.allocator) {}

void Connection::greet() { send_handshake(); }

void Connection::send_handshake() {
  const Bytes bytes = handshake_.take_output();
  if (bytes.empty()) return;
  // A new socket has room for the few bytes of a handshake. One without room does not belong to a valid peer.
  const ssize_t sent = ::send(socket(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(bytes.size())) {
    throw Error(ErrorKind::kDisconnected,
                fmt::format("'{}' disconnected during the handshake", channel_->peer()));
  }
}

void Connection::on_event(const Poller::Event& event, std::span<std::byte> scratch, Handler& handler) {
  if (stage_ == Stage::kConnecting) {
    if (!event.writable && !event.hung_up) return;
    finish_dial(socket(), dial_->address);
    stage_ = Stage::kHandshake;
    greet();
    return;
  }
  if (stage_ == Stage::kSettling) return settle(handler);
  if (shares()) return receive_notes(event.hung_up, handler);
  if (event.writable && stage_ == Stage::kOpen) channel_->flush();
  if (event.readable || event.hung_up) receive(event.hung_up, scratch, handler);
}

void Connection::receive(bool hung_up, std::span<std::byte> scratch, Handler& handler) {
  std::array<iovec, kReceiveIovecs + 1> places;
  for (int round = 0; round < kReadRounds; ++round) {
    const std::size_t count = parser_.targets(std::span(places).first(kReceiveIovecs));
    std::size_t direct = 0;
    for (std::size_t i = 0; i < count; ++i) direct += places[i].iov_len;
    places[count] = {scratch.data(), scratch.size()};
    const ssize_t result = ::readv(socket(), places.data(), static_cast<int>(count + 1));
    if (result == 0) throw_end_of_stream();
    if (result < 0 && errno == EINTR) continue;
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (hung_up) throw_end_of_stream();
      return;
    }
    if (result < 0) {
      throw Error(
          ErrorKind::kDisconnected,
          fmt::format(
              "the connection to '{}' broke ({}): its process died or was killed, or the network ended it",
              channel_->peer(), std::strerror(errno)));
    }
    const auto received = static_cast<std::size_t>(result);
    const std::size_t in_place = std::min(received, direct);
    take(in_place, scratch.first(received - in_place), handler);
    if (received < direct + scratch.size() && !hung_up) return;
  }
}

void Connection::take(std::size_t direct, BytesView rest, Handler& handler) {
  if (stage_ == Stage::kHandshake) shake_hands(rest, handler);
  if (stage_ != Stage::kOpen || shares()) return;
  const std::exception_ptr failure = parse(direct, rest);
  deliver(handler);
  if (failure) throw cut_off(channel_->peer(), to_error(failure));
}

std::exception_ptr Connection::parse(std::size_t direct, BytesView rest) {
  try {
    parser_.received(direct, messages_);
    parser_.feed(rest, messages_);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void Connection::shake_hands(BytesView& bytes, Handler& handler) {
  try {
    bytes = bytes.subspan(handshake_.receive(bytes));
  } catch (const Error&) {
    send_handshake();
    throw;
  }
  send_handshake();
  if (!handshake_.done()) return;
  if (lane_ == nullptr || (handshake_.features() & kSharesMemory) == 0) {
    lane_.reset();
    return open(handler);
  }
  stage_ = Stage::kSettling;
  try {
    lane_->begin(socket());
  } catch (const Error&) {
    throw_lane(std::current_exception());
  }
}

void Connection::settle(Handler& handler) {
  Lane::Outcome outcome;
  try {
    outcome = lane_->settle();
  } catch (const Error&) {
    throw_lane(std::current_exception());
  }
  if (outcome == Lane::Outcome::kUnsettled) return;
  if (outcome == Lane::Outcome::kDeclined) lane_.reset();
  if (lane_)
    parser_.adopt_with([this](std::uint64_t block, std::size_t size) { return lane_->adopt(block, size); });
  open(handler);
}

void Connection::open(Handler& handler) {
  stage_ = Stage::kOpen;
  if (!dialed()) handler.on_accepted(channel_);
  channel_->open(socket(), lane_.get());
}

void Connection::receive_notes(bool hung_up, Handler& handler) {
  bool ended;
  try {
    ended = lane_->read_notes() || hung_up;
  } catch (const Error&) {
    throw_lane(std::current_exception());
  }
  if (!ended) return;
  // Delivers what the peer wrote before it ended, at most one full ring.
  drain_lane(lane_->capacity(), handler);
  throw_end_of_stream();
}

bool Connection::serve_lane(Handler& handler) {
  bool any = drain_lane(kLaneRounds * lane_->capacity(), handler);
  const std::size_t unsent = channel_->unsent_bytes();
  if (unsent != 0) {
    channel_->flush();
    any |= channel_->unsent_bytes() != unsent;
  }
  return any;
}

bool Connection::drain_lane(std::size_t most, Handler& handler) {
  std::size_t drained = 0;
  while (drained < most) {
    BytesView bytes;
    try {
      bytes = lane_->readable();
    } catch (const Error&) {
      throw_lane(std::current_exception());
    }
    if (bytes.empty()) break;
    drained += bytes.size();
    const std::exception_ptr failure = parse(0, bytes);
    lane_->consume(bytes.size());
    deliver(handler);
    if (failure) throw cut_off(channel_->peer(), to_error(failure));
  }
  return drained != 0;
}

void Connection::throw_lane(const std::exception_ptr& failure) const {
  const Error error = to_error(failure);
  throw Error(error.kind(), fmt::format("'{}' {}", channel_->peer(), error.message()));
}

void Connection::deliver(Handler& handler) {
  const bool several = messages_.size() > 1;
  if (several) channel_->cork();
  for (Message& message : messages_) handler.on_message(channel_, std::move(message));
  messages_.clear();
  if (several) channel_->uncork();
}

Error Connection::timed_out() const {
  if (stage_ == Stage::kConnecting) {
    return Error(ErrorKind::kTimedOut,
                 fmt::format("'{}' did not accept the connection in time: is that host overloaded?",
                             channel_->peer()));
  }
  const bool proved = stage_ != Stage::kHandshake && stage_ != Stage::kSettling;
  return proved ? not_acknowledged(channel_->peer()) : handshake_late(channel_->peer());
}

void Connection::throw_end_of_stream() const {
  const std::string& peer = channel_->peer();
  if (stage_ == Stage::kHandshake) throw handshake_broken(peer);
  if (channel_->state().said_goodbye) throw closed_here(peer);
  if (heard_goodbye()) throw closed_by_peer(peer);
  throw stream_ended(peer, parser_.mid_frame());
}

}  // namespace torchspan::net
