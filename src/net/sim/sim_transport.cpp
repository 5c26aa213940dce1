#include "net/sim/sim_transport.h"

#include <cstring>
#include <fmt/format.h>

#include "core/api/throw_invalid.h"
#include "net/channel_errors.h"

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
  if (ended_ || closing_) throw nothing_can_be_sent(peer_, ended_);
  const std::size_t unsent = unsent_locked();
  if (unsent != 0 && unsent + size > max_unsent_) throw peer_overloaded(peer_, unsent, size, max_unsent_);
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

namespace {

constexpr std::string_view kPrefix = "sim:";

std::string name_in(const std::string& address) {
  if (!address.starts_with(kPrefix) || address.size() == kPrefix.size()) {
    throw_invalid("'{}' is not an address of this transport: write sim:name", address);
  }
  return address.substr(kPrefix.size());
}

}  // namespace

SimTransport::SimTransport(std::shared_ptr<SimNetwork::Impl> network, const std::string& name,
                           Handler& handler, TransportOptions options)
    : network_(std::move(network)),
      handler_(handler),
      options_(std::move(options)),
      poller_(network_->executor.make_poller()),
      node_(std::make_shared<SimNode>(name, poller_.get())) {
  MutexLock lock(network_->mutex);
  network_->enter(node_);
}

SimTransport::~SimTransport() {
  const Error reason(ErrorKind::kDisconnected, "this side's transport has ended");
  std::vector<std::shared_ptr<SimChannel>> new_channels, reviews;
  std::deque<Arrival> inbox;
  {
    MutexLock lock(network_->mutex);
    node_->alive = false;
    node_->poller = nullptr;
    new_channels.swap(node_->new_channels);
    reviews.swap(node_->reviews);
    inbox.swap(node_->inbox);
    network_->leave(*node_);
  }
  for (const auto& [id, channel] : channels_) channel->end(reason);
  for (const auto& channel : new_channels) channel->end(reason);
}

std::string SimTransport::listen(const std::string& address) {
  if (name_in(address) != node_->name) {
    throw_invalid("the simulated transport '{0}' listens at 'sim:{0}' only, not at '{1}'", node_->name,
                  address);
  }
  MutexLock lock(network_->mutex);
  if (node_->listening) throw_invalid("'{}' is in use: it listens already", address);
  node_->listening = true;
  return address;
}

bool SimTransport::can_reach(const std::string& address) const {
  return address.starts_with(kPrefix) && address.size() > kPrefix.size();
}

std::shared_ptr<Channel> SimTransport::connect(const std::string& address, Deadline deadline) {
  const std::string target = name_in(address);
  MutexLock lock(network_->mutex);
  auto channel =
      std::make_shared<SimChannel>(SimChannel::Start{.network = network_,
                                                     .node = node_,
                                                     .outward = network_->make_wire(node_->name, target),
                                                     .inward = network_->make_wire(target, node_->name),
                                                     .id = network_->next_id(),
                                                     .deadline = deadline,
                                                     .dialed = true},
                                   options_);
  channel->outward()->source = channel;
  channel->inward()->target = channel;
  if (node_->alive) {
    network_->transmit(
        channel->outward(),
        {.kind = Packet::Kind::kDial, .header = channel->handshake.take_output(), .segments = {}});
  }
  node_->new_channels.push_back(channel);
  node_->wake();
  return channel;
}

void SimTransport::wait(Deadline deadline) {
  {
    MutexLock lock(network_->mutex);
    if (!node_->inbox.empty() || !node_->new_channels.empty() || !node_->reviews.empty()) return;
  }
  poller_->wait({}, earlier(deadline, timers_.next()));
}

bool SimTransport::poll() {
  bool any = take_requests();
  any |= end_all_if_killed();
  while (std::optional<Arrival> arrival = next_arrival()) {
    any = true;
    handle(*std::move(arrival));
  }
  if (!timers_.next().is_never()) any |= run_timers();
  return any;
}

bool SimTransport::take_requests() {
  std::vector<std::shared_ptr<SimChannel>> new_channels, reviews;
  {
    MutexLock lock(network_->mutex);
    new_channels.swap(node_->new_channels);
    reviews.swap(node_->reviews);
  }
  for (const auto& channel : new_channels) start_handshake(channel);
  for (const auto& channel : reviews) {
    if (channels_.contains(channel->id())) review(channel);
  }
  return !new_channels.empty() || !reviews.empty();
}

std::optional<Arrival> SimTransport::next_arrival() {
  MutexLock lock(network_->mutex);
  if (node_->inbox.empty()) return std::nullopt;
  Arrival arrival = std::move(node_->inbox.front());
  node_->inbox.pop_front();
  if (arrival.source) arrival.source->arrived(arrival.packet.size());
  return arrival;
}

void SimTransport::handle(Arrival arrival) {
  if (arrival.packet.kind == Packet::Kind::kDial) {
    if (unauthenticated_.size() < options_.max_unauthenticated)
      return welcome(arrival.source, arrival.packet.header);
    backlog_.push_back(std::move(arrival));
    return shorten_oldest_handshake();
  }
  const std::shared_ptr<SimChannel>& channel = arrival.channel;
  if (!channels_.contains(channel->id())) return;
  switch (arrival.packet.kind) {
    case Packet::Kind::kHandshake:
      return shake_hands(channel, arrival.packet.header);
    case Packet::Kind::kMessage:
      return deliver(channel, std::move(arrival.packet));
    case Packet::Kind::kGoodbye:
      channel->heard_goodbye = true;
      return review(channel);
    case Packet::Kind::kEnd:
      return end(channel, gone(*channel));
    case Packet::Kind::kNoListener:
      return end(channel,
                 Error(ErrorKind::kDisconnected,
                       fmt::format("no worker listens at '{}'; is it running yet?", channel->peer())));
    case Packet::Kind::kDial:
      return;
  }
}

void SimTransport::welcome(const std::shared_ptr<SimChannel>& dialer, const Bytes& greeting) {
  if (dialer->state().ended) return;
  std::shared_ptr<SimChannel> channel;
  {
    MutexLock lock(network_->mutex);
    channel = std::make_shared<SimChannel>(SimChannel::Start{.network = network_,
                                                             .node = node_,
                                                             .outward = dialer->inward(),
                                                             .inward = dialer->outward(),
                                                             .id = network_->next_id(),
                                                             .deadline = Deadline::never(),
                                                             .dialed = false},
                                           options_);
    channel->outward()->source = channel;
    channel->inward()->target = channel;
  }
  unauthenticated_.emplace(channel->id(), network_->executor.now());
  start_handshake(channel);
  shake_hands(channel, greeting);
}

void SimTransport::start_handshake(const std::shared_ptr<SimChannel>& channel) {
  channels_.emplace(channel->id(), channel);
  const Deadline patience = network_->executor.deadline_in(options_.handshake_timeout);
  timers_.set(channel->id(), earlier(patience, channel->deadline()).at());
}

void SimTransport::shake_hands(const std::shared_ptr<SimChannel>& channel, BytesView bytes) {
  std::optional<Error> failure;
  try {
    channel->handshake.receive(bytes);
  } catch (const Error& error) {
    failure = error;
  }
  {
    Bytes output = channel->handshake.take_output();
    MutexLock lock(network_->mutex);
    if (!output.empty()) {
      network_->transmit(channel->outward(),
                         {.kind = Packet::Kind::kHandshake, .header = std::move(output), .segments = {}});
    }
  }
  if (failure) return end(channel, *failure);
  if (!channel->handshake.done() || !channel->handshake_pending) return;
  timers_.set(channel->id(), std::nullopt);
  end_handshake(*channel);
  if (!channel->dialed()) handler_.on_accepted(channel);
  channel->open();
  review(channel);
}

void SimTransport::end_handshake(SimChannel& channel) {
  channel.handshake_pending = false;
  if (channel.dialed()) return;
  unauthenticated_.erase(channel.id());
  welcome_backlog();
}

void SimTransport::welcome_backlog() {
  while (!backlog_.empty() && unauthenticated_.size() < options_.max_unauthenticated) {
    const Arrival arrival = std::move(backlog_.front());
    backlog_.pop_front();
    welcome(arrival.source, arrival.packet.header);
  }
  if (!backlog_.empty()) shorten_oldest_handshake();
}

void SimTransport::shorten_oldest_handshake() {
  if (unauthenticated_.empty()) return;
  const auto& [id, arrived] = *unauthenticated_.begin();
  const auto timeout = timers_.of(id);
  const TimePoint due = arrived + kMinHandshakeTimeout;
  if (timeout && due < *timeout) timers_.set(id, due);
}

void SimTransport::deliver(const std::shared_ptr<SimChannel>& channel, Packet packet) {
  std::optional<Message> message;
  try {
    message = receive(channel, std::move(packet));
  } catch (const std::exception&) {
    return end(channel, cut_off(channel->peer(), to_error(std::current_exception())));
  }
  {
    MutexLock lock(network_->mutex);
    network_->count_delivered();
  }
  handler_.on_message(channel, *std::move(message));
}

Message SimTransport::receive(const std::shared_ptr<SimChannel>& channel, Packet packet) const {
  std::vector<Segment> sizes;
  for (const Bytes& segment : packet.segments) sizes.push_back({segment.data(), segment.size(), nullptr});
  check_message(packet.header, sizes, limits_of(options_));
  Message message{std::move(packet.header), {}};
  for (std::size_t i = 0; i < packet.segments.size(); ++i) {
    const Bytes& segment = packet.segments[i];
    const std::uint32_t target = packet.device_targets[i];
    if (target != 0 && !channel->carries_device_memory())
      throw_invalid("received a segment for device memory, which this side does not carry");
    Buffer buffer;
    if (target != 0) buffer = handler_.device_memory(channel, target, segment.size());
    buffer.device_target = buffer.data == nullptr ? 0 : target;
    if (buffer.data == nullptr) buffer = options_.allocator(segment.size());
    if (buffer.size < segment.size()) {
      throw Error(ErrorKind::kOverloaded,
                  fmt::format("no memory for a received segment of {} bytes", segment.size()));
    }
    buffer.size = segment.size();
    if (!segment.empty()) std::memcpy(buffer.data, segment.data(), segment.size());
    message.segments.push_back(std::move(buffer));
  }
  return message;
}

void SimTransport::review(const std::shared_ptr<SimChannel>& channel) {
  const SimChannel::State state = channel->state();
  if (channel->heard_goodbye && (!state.closing || state.said_goodbye)) {
    return end(channel, state.closing ? closed_here(channel->peer()) : closed_by_peer(channel->peer()));
  }
  if (state.said_goodbye && !timers_.of(channel->id()))
    timers_.set(channel->id(), network_->executor.now() + options_.linger);
}

void SimTransport::end(std::shared_ptr<SimChannel> channel, const Error& reason) {
  const bool announced = channel->dialed() || !channel->handshake_pending;
  channels_.erase(channel->id());
  timers_.set(channel->id(), std::nullopt);
  if (channel->handshake_pending) end_handshake(*channel);
  channel->end(reason);
  announced ? handler_.on_closed(channel, reason) : handler_.on_refused(channel->peer(), reason);
}

Error SimTransport::gone(const SimChannel& channel) const {
  const std::string peer = channel.peer();
  if (channel.handshake_pending) return handshake_broken(peer);
  return channel.state().said_goodbye ? closed_here(peer) : stream_ended(peer, false);
}

Error SimTransport::timed_out(const SimChannel& channel) const {
  return channel.handshake_pending ? handshake_late(channel.peer()) : not_acknowledged(channel.peer());
}

bool SimTransport::end_all_if_killed() {
  {
    MutexLock lock(network_->mutex);
    if (node_->alive) return false;
    node_->inbox.clear();
  }
  backlog_.clear();
  const bool any = !channels_.empty();
  const Error reason(ErrorKind::kDisconnected, fmt::format("the simulation killed '{}'", node_->name));
  while (!channels_.empty()) end(channels_.begin()->second, reason);
  return any;
}

bool SimTransport::run_timers() {
  const TimePoint now = network_->executor.now();
  bool any = false;
  while (const auto id = timers_.take_due(now)) {
    any = true;
    const auto channel = channels_.at(*id);
    end(channel, timed_out(*channel));
  }
  return any;
}

}  // namespace torchspan::net
