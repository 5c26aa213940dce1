#include "net/tls/tls_transport.h"

#include <algorithm>
#include <fmt/format.h>

#include "net/receive_buffers.h"
#include "net/socket_limits.h"

namespace torchspan::net {
namespace {

/// Without a connection there are only callers to come, and looking for them costs a system call.
constexpr std::size_t kPollsBetweenAccepts = 64;

TlsOptions checked(TlsOptions options) {
  if (options.lanes > kMostLanes) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("TlsOptions::lanes is {}: it may be at most {}", options.lanes, kMostLanes));
  }
  if (options.heartbeat <= Duration::zero() || options.dead_after < 2 * options.heartbeat) {
    throw Error(ErrorKind::kInvalid,
                "TlsOptions::heartbeat must be more than nothing, and dead_after at least twice as long");
  }
  return options;
}

}  // namespace

TlsTransport::TlsTransport(Executor& executor, Handler& handler, TransportOptions options, TlsOptions tls,
                           std::string scheme)
    : executor_(executor),
      handler_(handler),
      options_(with_receive_buffers(std::move(options))),
      tls_(checked(std::move(tls))),
      scheme_(std::move(scheme)),
      context_(std::make_shared<const TlsContext>(options_.secret, tls_)),
      poller_(executor.make_poller()),
      request_queue_(std::make_shared<TlsRequestQueue>(*poller_)),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(kScratchBytes)),
      resolver_(executor) {}

TlsTransport::~TlsTransport() {
  const Error reason(ErrorKind::kDisconnected, "this side's transport has ended");
  const TlsRequestQueue::Requests left = request_queue_->close();
  for (const auto& errand : left.connections) {
    if (errand->dial) errand->dial->channel->end(reason);
  }
  for (const auto& [token, link] : links_) link->channel()->end(reason);
}

std::shared_ptr<TlsChannel> TlsTransport::make_channel(std::string peer, std::uint64_t token) const {
  return std::make_shared<TlsChannel>(
      TlsChannel::Options{std::move(peer), token, limits_of(options_), options_.max_unsent}, request_queue_);
}

std::string TlsTransport::listen(const std::string& text) {
  const TlsPlace place = parse_tls_address(text, scheme_);
  std::optional<Address> address = numeric_address(place);
  try {
    if (!address) address = look_up(place).front();
  } catch (const Error& error) {
    throw Error(ErrorKind::kInvalid, error.message());
  }
  auto socket = std::make_unique<ListeningSocket>(*address);
  std::string bound = with_port(place, socket->address().port);
  request_queue_->post(std::move(socket));
  return bound;
}

bool TlsTransport::can_reach(const std::string& address) const {
  try {
    parse_tls_address(address, scheme_);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::shared_ptr<Channel> TlsTransport::connect(const std::string& text, Deadline deadline) {
  auto errand = std::make_unique<TlsRequest>();
  errand->token = next_token_.fetch_add(1, std::memory_order_relaxed);
  TlsRequest::Dial& dial = errand->dial.emplace();
  dial.place = parse_tls_address(text, scheme_);
  dial.deadline = deadline;
  dial.channel = make_channel(text, errand->token);
  std::shared_ptr<Channel> channel = dial.channel;
  if (const auto address = numeric_address(dial.place)) dial.addresses = {*address};
  const bool by_name = dial.addresses.empty();
  const TlsPlace place = dial.place;
  const std::uint64_t token = errand->token;
  request_queue_->post(std::move(errand));
  if (!by_name) return channel;
  const auto answered = [request_queue = request_queue_, token](Resolver::Answer answer) {
    auto news = std::make_unique<TlsRequest>();
    news->token = token;
    news->resolved = TlsRequest::Resolved{std::move(answer.addresses), std::move(answer.failure)};
    request_queue->post(std::move(news));
  };
  try {
    resolver_.look_up(place, answered);
  } catch (const Error& error) {
    answered({{}, error});
  }
  return channel;
}

void TlsTransport::wake() {
  woken_.store(true, std::memory_order_release);
  poller_->wake();
}

void TlsTransport::wait(Deadline deadline) {
  if (prepare_sleep(deadline)) ready_ = poller_->wait(events_, deadline);
  end_sleep(false);
}

bool TlsTransport::prepare_sleep(Deadline& until) {
  // poll() may have swallowed the poller's own token: what woke it is remembered here.
  if (woken_.exchange(false, std::memory_order_acquire) || ready_ != 0 || request_queue_->pending() ||
      !backlog_.empty()) {
    return false;
  }
  if (!timers_.empty()) until = earlier(until, Deadline(timers_.begin()->first));
  if (const auto* buffers = ReceiveBuffers::of(options_))
    until = earlier(until, buffers->tidy(executor_.now()));
  if (!links_.empty()) until = earlier(until, Deadline(next_tick_));
  return true;
}

void TlsTransport::end_sleep(bool ready) {
  woken_.store(false, std::memory_order_relaxed);
  if (ready) polls_ = kPollsBetweenAccepts;
}

bool TlsTransport::poll() {
  now_ = executor_.now();
  bool any = request_queue_->pending() && take_requests();
  if (ready_ == 0 && must_look()) ready_ = poller_->wait(events_, kNoWait);
  polls_ = must_look() || ready_ != 0 ? 0 : polls_ + 1;
  const std::size_t count = std::exchange(ready_, 0);
  const std::vector<std::uint64_t> unfinished = std::exchange(backlog_, {});
  for (std::size_t i = 0; i < count; ++i) serve(events_[i]);
  for (const std::uint64_t token : unfinished) serve({token, true, false, false});
  if (!timers_.empty()) any |= run_timers();
  if (!links_.empty() && now_ >= next_tick_) tick();
  return any || count != 0 || !unfinished.empty();
}

bool TlsTransport::must_look() const { return !lanes_.empty() || polls_ >= kPollsBetweenAccepts; }

bool TlsTransport::take_requests() {
  TlsRequestQueue::Requests requests = request_queue_->take();
  for (auto& socket : requests.listeners) {
    const std::uint64_t token = next_token_.fetch_add(1, std::memory_order_relaxed);
    Listener& listener = listeners_[token];
    listener.socket = std::move(socket);
    watch(token, listener, true);
  }
  for (const auto& errand : requests.connections) run(*errand);
  for (std::uint64_t token : requests.reviews) {
    if (const auto found = links_.find(token); found != links_.end()) review(*found->second);
  }
  return true;
}

void TlsTransport::run(TlsRequest& errand) {
  if (errand.dial) {
    TlsRequest::Dial& dial = *errand.dial;
    const auto link = std::make_shared<TlsLink>(dial.channel, errand.token, true, options_);
    link->place = std::move(dial.place);
    link->addresses = std::move(dial.addresses);
    if (links_.empty()) next_tick_ = now_ + tls_.heartbeat;
    links_.emplace(errand.token, link);
    TlsLane& lane = *lanes_
                         .emplace(errand.token, std::make_unique<TlsLane>(errand.token, Role::kDialer,
                                                                          dial.channel->peer(), 0))
                         .first->second;
    lane.link = link;
    link->lanes.push_back(errand.token);
    set_timer(lane, earlier(Deadline(now_ + options_.handshake_timeout), dial.deadline).at());
    if (!link->addresses.empty()) dial_first(lane);
    return;
  }
  const auto found = lanes_.find(errand.token);
  if (found == lanes_.end()) return;
  if (errand.resolved->failure) return fail(*found->second, *errand.resolved->failure);
  found->second->link->addresses = std::move(errand.resolved->addresses);
  dial_first(*found->second);
}

void TlsTransport::open_link(TlsLane& lane, const LinkPtr& link) {
  link->open = true;
  link->heard = now_;
  set_timer(lane, std::nullopt);
  if (!link->dialed()) handler_.on_accepted(link->channel());
  link->channel()->open(lane.session());
}

void TlsTransport::review(TlsLink& link) {
  const TlsChannel::State state = link.channel()->state();
  if (state.broken) return end_broken(link, *state.broken);
  if (link.open) {
    if (link.heard_goodbye() && (!state.closing || state.said_goodbye)) {
      const std::string peer = link.channel()->peer();
      return end(link, Error(ErrorKind::kDisconnected,
                             state.closing ? fmt::format("this side closed the channel to '{}'", peer)
                                           : fmt::format("'{}' closed the channel", peer)));
    }
    TlsLane& first = *lanes_.at(link.token());
    if (state.said_goodbye && !first.timer) set_timer(first, now_ + options_.linger);
  }
  for (const std::uint64_t token : link.lanes) {
    TlsLane& lane = *lanes_.at(token);
    const bool flushing = lane.stage() == TlsLane::Stage::kOpen && (state.flushing >> lane.slot & 1) != 0;
    watch(lane, flushing || (lane.session() && lane.session()->unsent() != 0));
  }
}

void TlsTransport::end_broken(TlsLink& link, const std::string& why) {
  // What the peer sent before it went is still to be had.
  TlsLane& first = *lanes_.at(link.token());
  try {
    while (link.open && first.receive({scratch_.get(), kScratchBytes}, handler_) && first.more) {
    }
  } catch (const Error&) {
  }
  const std::string peer = link.channel()->peer();
  end(link,
      Error(ErrorKind::kDisconnected, link.heard_goodbye() ? fmt::format("'{}' closed the channel", peer)
                                                           : fmt::format("'{}' is gone: {}", peer, why)));
}

void TlsTransport::end(TlsLink& link, const Error& reason, bool at_once) {
  const LinkPtr kept = links_.at(link.token());
  const bool announced = link.dialed() || link.open;
  // A transport that dialled itself has the other end under the same token.
  if (const auto found = accepted_.find(link.shared_token);
      found != accepted_.end() && found->second == &link) {
    accepted_.erase(found);
  }
  links_.erase(link.token());
  link.channel()->end(reason);
  for (const std::uint64_t token : std::exchange(link.lanes, {})) {
    TlsLane& lane = *lanes_.at(token);
    if (lane.session()) lane.session()->close(at_once);
    drop(lane);
  }
  if (announced) handler_.on_closed(link.channel(), reason);
}

void TlsTransport::set_timer(TlsLane& lane, std::optional<TimePoint> when) {
  if (lane.timer) timers_.erase({*lane.timer, lane.token()});
  lane.timer = when;
  if (when && *when != TimePoint::max()) timers_.emplace(*when, lane.token());
}

bool TlsTransport::run_timers() {
  bool any = false;
  while (!timers_.empty() && timers_.begin()->first <= now_) {
    any = true;
    const std::uint64_t token = timers_.begin()->second;
    timers_.erase(timers_.begin());
    if (const auto found = lanes_.find(token); found != lanes_.end()) {
      fail(*found->second, timed_out(*found->second));
    } else if (const auto listener = listeners_.find(token); listener != listeners_.end()) {
      listener->second.resume.reset();
      resume_listeners();
    }
  }
  return any;
}

Error TlsTransport::timed_out(const TlsLane& lane) const {
  switch (lane.stage()) {
    case TlsLane::Stage::kResolving:
      return Error(ErrorKind::kTimedOut,
                   fmt::format("the host name of '{}' was not found in time: does the name service answer "
                               "here (getent hosts)?",
                               lane.peer()));
    case TlsLane::Stage::kConnecting:
      return Error(ErrorKind::kTimedOut,
                   fmt::format("'{}' did not take the call in time: is that host up, and does a firewall "
                               "let this port through?",
                               lane.peer()));
    case TlsLane::Stage::kTls:
    case TlsLane::Stage::kHello:
      return Error(ErrorKind::kTimedOut,
                   fmt::format("'{}' did not finish the handshake in time: it is stopped, overloaded, or no "
                               "worker",
                               lane.peer()));
    case TlsLane::Stage::kOpen:
      break;
  }
  if (lane.link->channel()->state().closing) {
    return Error(
        ErrorKind::kDisconnected,
        fmt::format("this side closed the channel to '{}', which did not take note in time", lane.peer()));
  }
  return Error(ErrorKind::kDisconnected,
               fmt::format("'{}' is gone: one of its connections ended without the others", lane.peer()));
}

bool TlsTransport::is_silent(const TlsLink& link) const {
  // A peer that said goodbye waits for us without a word, as long as it lingers.
  const Duration limit = tls_.dead_after + (link.is_leaving() ? options_.linger : Duration::zero());
  return link.open && now_ - link.heard > limit;
}

void TlsTransport::tick() {
  next_tick_ = now_ + tls_.heartbeat;
  std::vector<std::uint64_t> silent;
  for (const auto& [token, link] : links_) {
    if (link->open) link->channel()->beat();
    if (is_silent(*link)) silent.push_back(token);
  }
  for (const std::uint64_t token : silent) {
    // Nobody may have looked for a while, or at 64 others: what it said waits to be read.
    if (const auto found = links_.find(token); found != links_.end()) {
      const std::vector<std::uint64_t> lanes = found->second->lanes;
      for (const std::uint64_t lane : lanes) serve({lane, true, false, false});
    }
    const auto still = links_.find(token);
    if (still == links_.end() || !is_silent(*still->second)) continue;
    end(*still->second,
        Error(ErrorKind::kDisconnected,
              fmt::format("'{}' was silent for {:.1f} s: its host is down, cut off, or does not run it any "
                          "more",
                          still->second->channel()->peer(), to_seconds(tls_.dead_after)))
            .with_elapsed(tls_.dead_after),
        true);
  }
}

std::unique_ptr<Transport> make_tls_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              TlsOptions tls) {
  return std::make_unique<TlsTransport>(executor, handler, std::move(options), std::move(tls));
}

}  // namespace torchspan::net
