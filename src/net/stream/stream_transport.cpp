#include "net/stream/stream_transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/receive_buffers.h"
#include "net/socket_limits.h"

namespace torchspan::net {
namespace {

constexpr std::size_t kScratchBytes = 64 << 10;
/// While frames take lanes the sockets have little to say, and looking at them costs a system call.
constexpr std::size_t kPollsBetweenLooks = 64;

}  // namespace

StreamTransport::StreamTransport(Executor& executor, Handler& handler, TransportOptions options,
                                 MakeLane make_lane)
    : executor_(executor),
      handler_(handler),
      options_(with_receive_buffers(std::move(options))),
      make_lane_(std::move(make_lane)),
      poller_(executor.make_poller()),
      request_queue_(std::make_shared<StreamRequestQueue>(*poller_)),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(kScratchBytes)) {
  if (options_.secret.empty()) {
    throw Error(ErrorKind::kInvalid,
                "a transport over sockets needs a cluster secret: set TransportOptions::secret, "
                "e.g. from Secret::from_file(path)");
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
  start.token = next_token_.fetch_add(1, std::memory_order_relaxed);
  start.channel = make_channel(text, start.token);
  start.lane = make_lane(start.dial->address, Role::kDialer);
  std::shared_ptr<Channel> channel = start.channel;
  try {
    Dialed dialed = dial(start.dial->address);
    start.socket = std::move(dialed.socket);
    start.connected = dialed.connected;
  } catch (const Error& error) {
    start.stillborn = error;
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
  // poll() may have swallowed the poller's own token: what woke it is remembered here.
  if (woken_.exchange(false, std::memory_order_acquire) || ready_ != 0 || request_queue_->pending())
    return false;
  if (!timers_.empty()) until = earlier(until, Deadline(timers_.begin()->first));
  if (const auto* buffers = ReceiveBuffers::of(options_))
    until = earlier(until, buffers->tidy(executor_.now()));
  bool may = true;
  const TimePoint now = sharing_.empty() ? TimePoint{} : executor_.now();
  for (Connection* connection : sharing_) {
    until = earlier(until, connection->lane().tidy(now));
    may &= connection->lane().prepare_sleep(connection->channel()->unsent_bytes() != 0);
  }
  return may;
}

void StreamTransport::end_sleep(bool ready) {
  for (Connection* connection : sharing_) connection->lane().end_sleep();
  woken_.store(false, std::memory_order_relaxed);
  if (ready) polls_ = kPollsBetweenLooks;
}

bool StreamTransport::poll() {
  bool any = request_queue_->pending() && take_requests();
  if (ready_ == 0 && must_look()) ready_ = poller_->wait(events_, kNoWait);
  polls_ = must_look() || ready_ != 0 ? 0 : polls_ + 1;
  const std::size_t count = std::exchange(ready_, 0);
  for (std::size_t i = 0; i < count; ++i) serve(events_[i]);
  any |= serve_lanes();
  if (!timers_.empty()) any |= run_timers();
  return any || count != 0;
}

bool StreamTransport::must_look() const {
  return sharing_.size() != connections_.size() || sharing_.empty() || polls_ >= kPollsBetweenLooks;
}

bool StreamTransport::serve_lanes() {
  bool any = false;
  for (std::size_t i = 0; i < sharing_.size();) {
    Connection* connection = sharing_[i];
    any |= serve_lane(*connection);
    // One that ended has left its place to the last.
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
  for (auto& socket : requests.listeners) {
    const std::uint64_t token = next_token_.fetch_add(1, std::memory_order_relaxed);
    Listener& listener = listeners_[token];
    listener.socket = std::move(socket);
    watch(token, listener, true);
  }
  for (auto& connection : requests.connections) adopt(std::move(connection));
  for (std::uint64_t token : requests.reviews) {
    if (const auto found = connections_.find(token); found != connections_.end()) review(*found->second);
  }
  return true;
}

void StreamTransport::adopt(std::unique_ptr<Connection> owned) {
  Connection& connection = *owned;
  connections_.emplace(connection.token(), std::move(owned));
  if (connection.stillborn()) return end(connection, *connection.stillborn());
  try {
    connection.watches_writing = connection.stage() == Connection::Stage::kConnecting;
    poller_->add(connection.socket(), connection.token(), connection.watches_writing);
    if (connection.stage() == Connection::Stage::kHandshake) connection.greet();
  } catch (const Error& error) {
    return end(connection, error);
  }
  Deadline deadline = executor_.deadline_in(options_.handshake_timeout);
  if (connection.dialed()) deadline = earlier(deadline, connection.dial()->deadline);
  set_timer(connection, deadline.at());
}

void StreamTransport::serve(const Poller::Event& event) {
  if (const auto found = connections_.find(event.token); found != connections_.end()) {
    handle(*found->second, event);
    return;
  }
  const auto listener = listeners_.find(event.token);
  if (listener != listeners_.end()) accept_from(listener->first, listener->second);
}

void StreamTransport::handle(Connection& connection, const Poller::Event& event) {
  std::optional<Error> failure;
  try {
    connection.on_event(event, {scratch_.get(), kScratchBytes}, handler_);
  } catch (const Error& error) {
    failure = error;
  }
  if (connection.handshake_pending && connection.stage() == Connection::Stage::kOpen) {
    set_timer(connection, std::nullopt);
    end_handshake(connection);
    if (connection.shares()) sharing_.push_back(&connection);
  }
  failure ? end(connection, *failure) : review(connection);
}

void StreamTransport::end_handshake(Connection& connection) {
  connection.handshake_pending = false;
  if (connection.dialed()) return;
  unauthenticated_.erase(connection.token());
  resume_listeners();
}

void StreamTransport::review(Connection& connection) {
  const StreamChannel::State state = connection.channel()->state();
  if (state.broken) return end_broken(connection, *state.broken);
  if (connection.stage() == Connection::Stage::kOpen) {
    if (connection.heard_goodbye() && (!state.closing || state.said_goodbye)) {
      const std::string peer = connection.channel()->peer();
      return end(connection, Error(ErrorKind::kDisconnected,
                                   state.closing ? fmt::format("this side closed the channel to '{}'", peer)
                                                 : fmt::format("'{}' closed the channel", peer)));
    }
    if (state.said_goodbye && !connection.timer) set_timer(connection, executor_.now() + options_.linger);
  }
  const bool writing = connection.stage() == Connection::Stage::kConnecting || state.flushing;
  if (writing == connection.watches_writing) return;
  connection.watches_writing = writing;
  poller_->change(connection.socket(), connection.token(), writing);
}

void StreamTransport::end_broken(Connection& connection, const std::string& why) {
  // What the peer sent before it went is still to be had.
  try {
    connection.on_event({connection.token(), true, false, true}, {scratch_.get(), kScratchBytes}, handler_);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kInvalid) return end(connection, error);
    end(connection,
        Error(ErrorKind::kDisconnected, fmt::format("'{}' is gone: {}", connection.channel()->peer(), why)));
  }
}

void StreamTransport::end(Connection& connection, Error reason) {
  const std::shared_ptr<StreamChannel> channel = connection.channel();
  const bool announced = connection.dialed() || connection.stage() == Connection::Stage::kOpen;
  set_timer(connection, std::nullopt);
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

void StreamTransport::set_timer(Connection& connection, std::optional<TimePoint> when) {
  if (connection.timer) timers_.erase({*connection.timer, connection.token()});
  connection.timer = when;
  if (when && *when != TimePoint::max()) timers_.emplace(*when, connection.token());
}

bool StreamTransport::run_timers() {
  const TimePoint now = executor_.now();
  bool any = false;
  while (!timers_.empty() && timers_.begin()->first <= now) {
    any = true;
    const std::uint64_t token = timers_.begin()->second;
    timers_.erase(timers_.begin());
    if (const auto found = connections_.find(token); found != connections_.end()) {
      end(*found->second, found->second->timed_out());
    } else if (const auto listener = listeners_.find(token); listener != listeners_.end()) {
      listener->second.resume.reset();
      resume_listeners();
    }
  }
  return any;
}

void StreamTransport::accept_from(std::uint64_t token, Listener& listener) {
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

void StreamTransport::welcome(Descriptor socket, const Listener& listener) {
  const Address& address = listener.socket->address();
  std::string peer = name_accepted(socket.get(), address);
  try {
    if (address.kind == Address::Kind::kUnix) check_peer_user(socket.get(), peer, ::geteuid());
  } catch (const Error& error) {
    return handler_.on_refused(peer, error);
  }
  Connection::Start start;
  start.socket = std::move(socket);
  start.connected = true;
  start.token = next_token_.fetch_add(1, std::memory_order_relaxed);
  start.channel = make_channel(std::move(peer), start.token);
  start.lane = make_lane(address, Role::kListener);
  unauthenticated_.emplace(start.token, executor_.now());
  adopt(std::make_unique<Connection>(std::move(start), options_));
}

void StreamTransport::watch(std::uint64_t token, Listener& listener, bool on) {
  if (listener.watched == on) return;
  listener.watched = on;
  on ? poller_->add(listener.socket->get(), token, false) : poller_->remove(listener.socket->get());
}

void StreamTransport::pause(std::uint64_t token, Listener& listener, int reason) {
  watch(token, listener, false);
  listener.resume = executor_.now() + kPauseWithoutDescriptors;
  timers_.emplace(*listener.resume, token);
  handler_.on_refused(listener.socket->address().text,
                      Error(ErrorKind::kOverloaded,
                            fmt::format("callers have to wait: {}; raise the limit of open files (ulimit -n)",
                                        std::strerror(reason))));
}

void StreamTransport::shorten_handshakes() {
  if (unauthenticated_.empty()) return;
  const auto& [token, arrived] = *unauthenticated_.begin();
  Connection& first = *connections_.at(token);
  const TimePoint due = arrived + kLeastPatience;
  if (first.timer && due < *first.timer) set_timer(first, due);
}

void StreamTransport::resume_listeners() {
  if (unauthenticated_.size() >= options_.max_unauthenticated) return;
  for (auto& [token, listener] : listeners_) {
    if (!listener.resume) watch(token, listener, true);
  }
}

std::unique_ptr<Transport> make_stream_transport(Executor& executor, Handler& handler,
                                                 TransportOptions options) {
  return std::make_unique<StreamTransport>(executor, handler, std::move(options));
}

}  // namespace torchspan::net
