#include "net/stream/stream_transport.h"

#include <algorithm>
#include <unistd.h>

#include "net/channel_errors.h"
#include "net/receive_buffers.h"
#include "net/stream/socket.h"

namespace torchspan::net {
namespace {

constexpr std::size_t kScratchBytes = 64 << 10;
/// While frames take lanes, sockets rarely have events, and polling them costs a system call.
constexpr std::size_t kPollsBetweenSockets = 64;

}  // namespace

StreamTransport::StreamTransport(Executor& executor, Handler& handler, TransportOptions options,
                                 MakeLane make_lane)
    : executor_(executor),
      handler_(handler),
      options_(with_receive_buffers(std::move(options))),
      make_lane_(std::move(make_lane)),
      poller_(executor.make_poller()),
      request_queue_(std::make_shared<StreamRequestQueue>(*poller_)),
      listener_({executor, handler, options_, *poller_, tokens_, timers_},
                [this](Descriptor socket, const Address& listener) { accept(std::move(socket), listener); }),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(kScratchBytes)) {
  if (options_.secret.empty()) {
    throw_invalid(
        "a transport over sockets needs a cluster secret: set TransportOptions::secret, e.g. from "
        "Secret::from_file(path)");
  }
}

StreamTransport::~StreamTransport() {
  const Error reason(ErrorKind::kDisconnected, "this side's transport has ended");
  const StreamRequestQueue::Requests left = request_queue_->close();
  for (const auto& connection : left.connections) connection->channel()->end(reason);
  for (const auto& [token, connection] : connections_) connection->channel()->end(reason);
}

std::shared_ptr<StreamChannel> StreamTransport::make_channel(std::string peer, std::uint64_t token) const {
  return std::make_shared<StreamChannel>(
      StreamChannel::Options{std::move(peer), token, limits_of(options_), options_.max_unsent},
      request_queue_);
}

std::string StreamTransport::listen(const std::string& address) {
  auto socket = std::make_unique<ListeningSocket>(parse_address(address));
  std::string text = socket->address().text;
  request_queue_->post(std::move(socket));
  return text;
}

bool StreamTransport::can_reach(const std::string& address) const {
  try {
    parse_address(address);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::shared_ptr<Channel> StreamTransport::connect(const std::string& text, Deadline deadline) {
  Connection::Start start;
  start.dial = Connection::Dial{parse_address(text), deadline};
  start.token = tokens_.next();
  start.channel = make_channel(text, start.token);
  start.lane = make_lane(start.dial->address, Role::kDialer);
  std::shared_ptr<Channel> channel = start.channel;
  try {
    Dialed dialed = dial(start.dial->address);
    start.socket = std::move(dialed.socket);
    start.connected = dialed.connected;
  } catch (const Error& error) {
    start.dial_error = error;
  }
  request_queue_->post(std::make_unique<Connection>(std::move(start), options_));
  return channel;
}

std::unique_ptr<Lane> StreamTransport::make_lane(const Address& address, Role role) const {
  return make_lane_ && address.kind == Address::Kind::kUnix ? make_lane_(role) : nullptr;
}

void StreamTransport::wake() {
  woken_.store(true, std::memory_order_release);
  poller_->wake();
}

void StreamTransport::wait(Deadline deadline) {
  if (prepare_sleep(deadline)) ready_ = poller_->wait(events_, deadline);
  end_sleep(false);
}

bool StreamTransport::prepare_sleep(Deadline& until) {
  // poll() may have consumed the poller's wake-up, so wake() is remembered here.
  if (woken_.exchange(false, std::memory_order_acquire) || ready_ != 0 || request_queue_->pending())
    return false;
  until = earlier(until, timers_.next());
  if (const auto* buffers = ReceiveBuffers::of(options_))
    until = earlier(until, buffers->tidy(executor_.now()));
  bool may = true;
  const TimePoint now = sharing_.empty() ? TimePoint{} : executor_.now();
  for (Connection* connection : sharing_) {
    until = earlier(until, connection->lane().tidy(now));
    may &= connection->lane().prepare_sleep(connection->channel()->can_flush());
  }
  return may;
}

void StreamTransport::end_sleep(bool ready) {
  for (Connection* connection : sharing_) connection->lane().end_sleep();
  woken_.store(false, std::memory_order_relaxed);
  if (ready) polls_ = kPollsBetweenSockets;
}

bool StreamTransport::poll() {
  bool any = request_queue_->pending() && take_requests();
  if (ready_ == 0 && must_poll_sockets()) ready_ = poller_->wait(events_, kNoWait);
  polls_ = must_poll_sockets() || ready_ != 0 ? 0 : polls_ + 1;
  const std::size_t count = std::exchange(ready_, 0);
  for (std::size_t i = 0; i < count; ++i) serve(events_[i]);
  any |= serve_lanes();
  if (!timers_.next().is_never()) any |= run_timers();
  return any || count != 0;
}

bool StreamTransport::must_poll_sockets() const {
  return sharing_.size() != connections_.size() || sharing_.empty() || polls_ >= kPollsBetweenSockets;
}

bool StreamTransport::serve_lanes() {
  bool any = false;
  for (std::size_t i = 0; i < sharing_.size();) {
    Connection* connection = sharing_[i];
    any |= serve_lane(*connection);
    // A connection that ended was replaced by the last one.
    if (i < sharing_.size() && sharing_[i] == connection) ++i;
  }
  return any;
}

bool StreamTransport::serve_lane(Connection& connection) {
  try {
    if (!connection.serve_lane(handler_)) return false;
  } catch (const Error& error) {
    end(connection, error);
    return true;
  }
  review(connection);
  return true;
}

bool StreamTransport::take_requests() {
  StreamRequestQueue::Requests requests = request_queue_->take();
  for (auto& socket : requests.listeners) listener_.add(std::move(socket));
  for (auto& connection : requests.connections) adopt(std::move(connection));
  for (std::uint64_t token : requests.reviews) {
    if (const auto found = connections_.find(token); found != connections_.end()) review(*found->second);
  }
  return true;
}

void StreamTransport::adopt(std::unique_ptr<Connection> owned) {
  Connection& connection = *owned;
  connections_.emplace(connection.token(), std::move(owned));
  if (connection.dial_error()) return end(connection, *connection.dial_error());
  try {
    connection.watches_writing = connection.stage() == Connection::Stage::kConnecting;
    poller_->add(connection.socket(), connection.token(), connection.watches_writing);
    if (connection.stage() == Connection::Stage::kHandshake) connection.greet();
  } catch (const Error& error) {
    return end(connection, error);
  }
  Deadline deadline = executor_.deadline_in(options_.handshake_timeout);
  if (connection.dialed()) deadline = earlier(deadline, connection.dial()->deadline);
  timers_.set(connection.token(), deadline.at());
}

void StreamTransport::serve(const Poller::Event& event) {
  if (const auto found = connections_.find(event.token); found != connections_.end()) {
    handle(*found->second, event);
    return;
  }
  listener_.serve(event.token);
}

void StreamTransport::handle(Connection& connection, const Poller::Event& event) {
  std::optional<Error> failure;
  try {
    connection.on_event(event, {scratch_.get(), kScratchBytes}, handler_);
  } catch (const Error& error) {
    failure = error;
  }
  if (connection.handshake_pending && connection.stage() == Connection::Stage::kOpen) {
    timers_.set(connection.token(), std::nullopt);
    end_handshake(connection);
    if (connection.shares()) sharing_.push_back(&connection);
  }
  failure ? end(connection, *failure) : review(connection);
}

void StreamTransport::end_handshake(Connection& connection) {
  connection.handshake_pending = false;
  if (connection.dialed()) return;
  listener_.remove_unauthenticated(connection.token());
}

void StreamTransport::review(Connection& connection) {
  const StreamChannel::State state = connection.channel()->state();
  if (state.broken) return end_broken(connection, *state.broken);
  if (connection.stage() == Connection::Stage::kOpen) {
    if (connection.heard_goodbye() && (!state.closing || state.said_goodbye)) {
      const std::string peer = connection.channel()->peer();
      return end(connection, state.closing ? closed_here(peer) : closed_by_peer(peer));
    }
    // A peer that is stopped reads nothing, so the goodbye may never leave the queue.
    if (state.closing && !timers_.of(connection.token()))
      timers_.set(connection.token(),
                  connection.linger.begin(executor_.now(), connection.channel()->unsent_bytes()));
  }
  const bool writing = connection.stage() == Connection::Stage::kConnecting || state.flushing;
  if (writing == connection.watches_writing) return;
  connection.watches_writing = writing;
  poller_->change(connection.socket(), connection.token(), writing);
}

void StreamTransport::end_broken(Connection& connection, const std::string& why) {
  // Delivers what the peer sent before the connection broke.
  try {
    connection.on_event({connection.token(), true, false, true}, {scratch_.get(), kScratchBytes}, handler_);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kInvalid) return end(connection, error);
    end(connection, peer_gone(connection.channel()->peer(), why));
  }
}

void StreamTransport::end(Connection& connection, Error reason) {
  const std::shared_ptr<StreamChannel> channel = connection.channel();
  const bool announced = connection.dialed() || connection.stage() == Connection::Stage::kOpen;
  timers_.set(connection.token(), std::nullopt);
  if (connection.handshake_pending) end_handshake(connection);
  if (connection.socket() >= 0) poller_->remove(connection.socket());
  channel->end(reason);
  if (const auto found = std::ranges::find(sharing_, &connection); found != sharing_.end()) {
    std::swap(*found, sharing_.back());
    sharing_.pop_back();
  }
  connections_.erase(connection.token());
  announced ? handler_.on_closed(channel, reason) : handler_.on_refused(channel->peer(), reason);
}

bool StreamTransport::run_timers() {
  const TimePoint now = executor_.now();
  bool any = false;
  while (const auto token = timers_.take_due(now)) {
    any = true;
    if (const auto found = connections_.find(*token); found != connections_.end()) {
      Connection& connection = *found->second;
      const std::size_t unsent = connection.channel()->unsent_bytes();
      if (connection.stage() == Connection::Stage::kOpen && connection.linger.has_moved(unsent)) {
        timers_.set(*token, connection.linger.begin(now, unsent));
      } else {
        end(connection, connection.timed_out());
      }
    } else {
      listener_.end_pause(*token);
    }
  }
  return any;
}

void StreamTransport::accept(Descriptor socket, const Address& listener) {
  std::string peer = name_accepted(socket.get(), listener);
  try {
    if (listener.kind == Address::Kind::kUnix) check_peer_user(socket.get(), peer, ::geteuid());
  } catch (const Error& error) {
    return handler_.on_refused(peer, error);
  }
  Connection::Start start;
  start.socket = std::move(socket);
  start.connected = true;
  start.token = tokens_.next();
  start.channel = make_channel(std::move(peer), start.token);
  start.lane = make_lane(listener, Role::kListener);
  listener_.add_unauthenticated(start.token);
  adopt(std::make_unique<Connection>(std::move(start), options_));
}

std::unique_ptr<Transport> make_stream_transport(Executor& executor, Handler& handler,
                                                 TransportOptions options) {
  return std::make_unique<StreamTransport>(executor, handler, std::move(options));
}

}  // namespace torchspan::net
