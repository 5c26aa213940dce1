#include "net/sim/sim_channel.h"

#include <fmt/format.h>

namespace torchspan::net {
namespace {

/// Bytes on a link beyond which a sender's bytes count as unsent: about the size of a socket's buffers.
constexpr std::size_t kWireBytes = 256 << 10;

HandshakeOptions handshake_options(const TransportOptions& options, std::string peer) {
  // Inside a process an empty secret is allowed: both sides then prove that they have none.
  HandshakeOptions handshake{
      .secret = options.secret.empty() ? Secret::from_bytes(Bytes(32)) : options.secret,
      .peer = std::move(peer)};
  draw_nonce(handshake.nonce);
  return handshake;
}

}  // namespace

SimChannel::SimChannel(Start start, const TransportOptions& options)
    : handshake(start.dialed ? Role::kDialer : Role::kListener,
                handshake_options(options, "sim:" + start.outward->to)),
      start_(std::move(start)),
      network_(*start_.network),
      peer_("sim:" + start_.outward->to),
      limits_(limits_of(options, options.device_memory != DeviceMemoryKind::kNone)),
      max_unsent_(options.max_unsent) {}

Packet SimChannel::copy_message(BytesView header, std::span<const Segment> segments) const {
  Packet packet{
      .kind = Packet::Kind::kMessage, .header = Bytes(header.begin(), header.end()), .segments = {}};
  packet.segments.reserve(segments.size());
  for (const Segment& segment : segments) {
    packet.segments.emplace_back(segment.data, segment.data + segment.size);
    packet.device_targets.push_back(segment.device_target);
  }
  return packet;
}

void SimChannel::send(BytesView header, std::span<const Segment> segments) {
  check_message(header, segments, limits_);
  Packet packet = copy_message(header, segments);
  SimMessage message{"sim:" + start_.outward->from, "sim:" + start_.outward->to, 0, packet.header,
                     packet.size()};
  {
    MutexLock lock(network_.mutex);
    check_room(packet.size());
    message.number = network_.next_number();
  }
  const Delivery delivery = network_.faults.decide(message);
  MutexLock lock(network_.mutex);
  if (delivery.dropped) return network_.count_dropped();
  packet.held = delivery.held || start_.outward->hold_rest;
  packet.extra = delivery.extra;
  if (delivery.hold_rest) start_.outward->hold_rest = true;
  under_way_.fetch_add(packet.size(), std::memory_order_relaxed);
  if (open_) {
    network_.transmit_message(start_.outward, std::move(packet));
  } else {
    queued_.push_back(std::move(packet));
  }
}

void SimChannel::check_room(std::size_t size) const {
  if (ended_ || closing_) {
    throw Error(ErrorKind::kDisconnected, fmt::format("nothing can be sent to '{}': {}", peer_,
                                                      ended_ ? *ended_ : "this side closed the channel"));
  }
  const std::size_t unsent = unsent_locked();
  if (unsent != 0 && unsent + size > max_unsent_) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("'{}' does not keep up: {} bytes are queued for it, {} more would pass "
                            "WorkerOptions::max_unsent_bytes ({}); wait for replies before sending more",
                            peer_, unsent, size, max_unsent_));
  }
}

std::size_t SimChannel::unsent_locked() const {
  const std::size_t under_way = under_way_.load(std::memory_order_relaxed);
  if (!open_) return under_way;
  return under_way > kWireBytes ? under_way - kWireBytes : 0;
}

std::size_t SimChannel::unsent_bytes() const {
  MutexLock lock(network_.mutex);
  return ended_ ? 0 : unsent_locked();
}

bool SimChannel::opened() const {
  MutexLock lock(network_.mutex);
  return open_;
}

void SimChannel::close() {
  MutexLock lock(network_.mutex);
  if (ended_ || closing_) return;
  closing_ = true;
  if (open_) network_.transmit(outward(), {.kind = Packet::Kind::kGoodbye, .header = {}, .segments = {}});
  start_.node->reviews.push_back(shared_from_this());
  start_.node->wake();
}

void SimChannel::open() {
  MutexLock lock(network_.mutex);
  open_ = true;
  for (Packet& packet : queued_) network_.transmit_message(outward(), std::move(packet));
  queued_.clear();
  if (closing_) network_.transmit(outward(), {.kind = Packet::Kind::kGoodbye, .header = {}, .segments = {}});
}

void SimChannel::end(const Error& reason) {
  MutexLock lock(network_.mutex);
  if (ended_) return;
  ended_ = reason.message();
  queued_.clear();
  network_.transmit(outward(), {.kind = Packet::Kind::kEnd, .header = {}, .segments = {}});
}

SimChannel::State SimChannel::state() const {
  MutexLock lock(network_.mutex);
  return {.closing = closing_, .said_goodbye = closing_ && open_, .ended = ended_ || start_.outward->dead};
}

}  // namespace torchspan::net
