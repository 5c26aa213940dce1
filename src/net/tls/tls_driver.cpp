#include "net/tls/tls_driver.h"

#include <algorithm>
#include <fmt/format.h>
#include <openssl/rand.h>

#include "core/api/throw_invalid.h"
#include "net/stream/socket.h"

namespace torchspan::net {

TlsDialer::TlsDialer(const DriverContext& driver, std::shared_ptr<const TlsContext> context, TlsLanes& lanes)
    : driver_(driver), context_(std::move(context)), lanes_(lanes) {}

template <class Dialing>
auto TlsDialer::explained(const TlsLink& link, const Dialing& dialing) const {
  const Address& address = link.addresses.at(link.address);
  try {
    return dialing(address);
  } catch (const Error& error) {
    throw Error(error.kind(), error.message() + loopback_hint(link.place, address));
  }
}

void TlsDialer::dial_first(TlsLane& lane) {
  try {
    start(lane);
  } catch (const Error& failure) {
    if (!redial(lane, failure)) throw with_earlier(lane, failure);
  }
}

void TlsDialer::dial_rest(const std::shared_ptr<TlsLink>& link) {
  for (std::uint8_t number = 1; number <= link->granted; ++number) {
    TlsLane& lane = lanes_.add(
        std::make_unique<TlsLane>(driver_.tokens.next(), Role::kDialer, link->channel()->peer(), number),
        link);
    try {
      start(lane);
    } catch (const Error&) {
      lanes_.drop(lane);
    }
  }
}

bool TlsDialer::redial(TlsLane& lane, const Error& failure) {
  TlsLink& link = *lane.link;
  if (!lane.first() || lane.stage() > TlsLane::Stage::kConnecting) return false;
  link.failures.push_back(failure.message());
  while (link.address + 1 < link.addresses.size()) {
    lanes_.unwatch(lane);
    ++link.address;
    try {
      start(lane);
      return true;
    } catch (const Error& next) {
      link.failures.push_back(next.message());
    }
  }
  return false;
}

Error TlsDialer::with_earlier(const TlsLane& lane, const Error& failure) {
  std::vector<std::string> all;
  if (lane.link) all = lane.link->failures;
  if (std::ranges::find(all, failure.message()) == all.end()) all.push_back(failure.message());
  return Error(failure.kind(), fmt::format("{}", fmt::join(all, "; ")));
}

void TlsDialer::start(TlsLane& lane) {
  const TlsLink& link = *lane.link;
  Dialed dialed = explained(link, [](const Address& address) { return dial(address); });
  auto session = std::make_shared<TlsSession>(
      context_, std::move(dialed.socket),
      TlsSession::Start{.role = Role::kDialer, .peer = lane.peer(), .host = link.place.host});
  lane.start(std::move(session), dialed.connected);
  lanes_.watch(lane, true);
  limit(lane, dialed.connected);
}

/// An address that does not answer must leave time for those after it.
void TlsDialer::limit(TlsLane& lane, bool connected) const {
  TlsLink& link = *lane.link;
  if (!lane.first()) return;
  if (!link.dialed_until) link.dialed_until = driver_.timers.of(lane.token());
  if (!link.dialed_until) return;
  const TimePoint now = driver_.executor.now(), until = *link.dialed_until;
  const auto left = static_cast<std::int64_t>(connected ? 1 : link.addresses.size() - link.address);
  driver_.timers.set(lane.token(), left == 1 ? until : now + (until - now) / left);
}

void TlsDialer::finish(TlsLane& lane) const {
  explained(*lane.link, [&](const Address& address) { finish_dial(lane.session()->socket(), address); });
  lane.connected();
  limit(lane, true);
}

namespace {

ChannelToken draw_channel_token() {
  ChannelToken token;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(token.data()), static_cast<int>(token.size())) != 1) {
    throw Error(ErrorKind::kUnsupported,
                "the system's random source returned no bytes for a channel's token");
  }
  return token;
}

}  // namespace

TlsAdmission::TlsAdmission(const TlsOptions& tls, TlsLanes& lanes, TlsLinks& links, TlsDialer& dialer)
    : most_lanes_(static_cast<std::uint8_t>(tls.lanes)),
      features_(tls.network == TcpNetwork::kIsolated ? kSendsUnencrypted : 0),
      lanes_(lanes),
      links_(links),
      dialer_(dialer) {}

LaneHello TlsAdmission::greeting_of(const TlsLane& lane) const {
  LaneHello hello{.features = features_};
  if (lane.role() == Role::kListener) return hello;
  hello.lanes = most_lanes_;
  hello.lane = lane.number();
  if (!lane.first()) hello.token = lane.link->shared_token;
  return hello;
}

void TlsAdmission::admit(TlsLane& lane, const LaneHello& hello) {
  if (lane.role() == Role::kDialer) return take_answer(lane, hello);
  hello.lane == 0 ? accept_first(lane, hello) : accept_further(lane, hello);
}

void TlsAdmission::accept_first(TlsLane& lane, const LaneHello& hello) {
  LaneHello answer{.lanes = std::min(hello.lanes, most_lanes_), .features = features_};
  answer.token = draw_channel_token();
  lane.say(answer);
  check_agreement(answer, hello, lane.peer());
  links_.open(lane, links_.add_accepted(lane, answer));
}

void TlsAdmission::accept_further(TlsLane& lane, const LaneHello& hello) {
  const auto link = links_.find_accepted(hello.token);
  if (!link || hello.lane > link->granted || lanes_.has_number(*link, hello.lane)) {
    // Most likely its channel has just ended.
    throw Error(ErrorKind::kDisconnected,
                fmt::format("'{}' asked to join a channel that does not exist (any more)", lane.peer()));
  }
  const LaneHello answer{.lane = hello.lane, .features = features_, .token = hello.token};
  lane.say(answer);
  check_agreement(answer, hello, lane.peer());
  link->lanes.push_back(lane.token());
  join(lane, link, hello.lane);
}

void TlsAdmission::take_answer(TlsLane& lane, const LaneHello& hello) {
  const auto link = lane.link;
  if (hello.lane != lane.number() || (!lane.first() && hello.token != link->shared_token)) {
    throw_invalid("'{}' answered for another connection", lane.peer());
  }
  if (!lane.first()) return join(lane, link, lane.number());
  link->shared_token = hello.token;
  link->granted = std::min(hello.lanes, most_lanes_);
  links_.open(lane, link);
  dialer_.dial_rest(link);
}

void TlsAdmission::join(TlsLane& lane, const std::shared_ptr<TlsLink>& link, std::uint8_t number) {
  lanes_.end_handshake(lane);
  lane.join(link, number);
}

TlsDriver::TlsDriver(const DriverContext& driver, const TlsOptions& tls,
                     std::shared_ptr<TlsRequestQueue> request_queue)
    : driver_(driver),
      context_(std::make_shared<const TlsContext>(driver.options.secret, tls)),
      listener_(driver, [this](Descriptor socket, const Address& at) { accept(std::move(socket), at); }),
      lanes_(driver, listener_),
      links_(driver, tls, lanes_, std::move(request_queue)),
      dialer_(driver, context_, lanes_),
      admission_(tls, lanes_, links_, dialer_) {}

void TlsDriver::carry_out(TlsRequestQueue::Requests requests) {
  for (auto& socket : requests.listeners) listener_.add(std::move(socket));
  for (const auto& request : requests.connections) carry_out(*request);
  for (const std::uint64_t token : requests.reviews) {
    if (const auto link = links_.find(token)) links_.review(*link);
  }
}

void TlsDriver::carry_out(TlsRequest& request) {
  if (request.dial) {
    TlsRequest::Dial& dial = *request.dial;
    const auto link = links_.add_dialed(dial.channel, request.token);
    link->place = std::move(dial.place);
    link->addresses = std::move(dial.addresses);
    TlsLane& lane = lanes_.add(
        std::make_unique<TlsLane>(request.token, Role::kDialer, dial.channel->peer(), std::uint8_t{0}), link,
        dial.deadline);
    if (!link->addresses.empty()) dial_first(lane);
    return;
  }
  TlsLane* const lane = lanes_.find(request.token);
  if (lane == nullptr) return;
  if (request.resolved->failure) return links_.fail(*lane, *request.resolved->failure);
  lane->link->addresses = std::move(request.resolved->addresses);
  dial_first(*lane);
}

void TlsDriver::dial_first(TlsLane& lane) {
  try {
    dialer_.dial_first(lane);
  } catch (const Error& error) {
    links_.fail(lane, error);
  }
}

void TlsDriver::accept(Descriptor socket, const Address& listener) {
  std::string peer = name_accepted(socket.get(), listener);
  std::shared_ptr<TlsSession> session;
  try {
    session = std::make_shared<TlsSession>(
        context_, std::move(socket), TlsSession::Start{.role = Role::kListener, .peer = peer, .host = {}});
  } catch (const Error& error) {
    return driver_.handler.on_refused(peer, error);
  }
  TlsLane& lane = lanes_.add(
      std::make_unique<TlsLane>(driver_.tokens.next(), Role::kListener, std::move(peer), std::uint8_t{0}));
  lane.start(std::move(session), true);
  listener_.add_unauthenticated(lane.token());
  try {
    lanes_.watch(lane, false);
  } catch (const Error& error) {
    links_.fail(lane, error);
  }
}

bool TlsDriver::serve(std::span<const Poller::Event> events) {
  now_ = driver_.executor.now();
  const std::vector<std::uint64_t> unfinished = lanes_.take_backlog();
  for (const Poller::Event& event : events) serve_socket(event);
  for (const std::uint64_t token : unfinished) serve_socket({token, true, false, false});
  const bool timed_out = run_timers();
  if (links_.next_beat().passed(now_)) beat();
  return timed_out || !events.empty() || !unfinished.empty();
}

void TlsDriver::serve_socket(const Poller::Event& event) {
  if (TlsLane* const lane = lanes_.find(event.token)) {
    serve_lane(*lane, event);
  } else {
    listener_.serve(event.token);
  }
}

void TlsDriver::serve_lane(TlsLane& lane, const Poller::Event& event) {
  const bool dialing = lane.stage() == TlsLane::Stage::kConnecting;
  try {
    step(lane, event);
    if (!lane.link) return lanes_.watch(lane, lane.session()->unsent() != 0);
  } catch (const Error& error) {
    if (!dialing || !dialer_.redial(lane, error)) links_.fail(lane, TlsDialer::with_earlier(lane, error));
    return;
  }
  lanes_.serve_resumed(*lane.link);
  links_.review(*lane.link);
}

void TlsDriver::step(TlsLane& lane, const Poller::Event& event) {
  if (lane.over || lane.stage() == TlsLane::Stage::kResolving) return;
  if (lane.stage() == TlsLane::Stage::kConnecting) {
    if (!event.writable && !event.hung_up) return;
    dialer_.finish(lane);
  }
  if (lane.stage() != TlsLane::Stage::kOpen) {
    if (event.writable) lane.session()->flush();
    const std::optional<LaneHello> hello = lane.handshake(admission_.greeting_of(lane));
    if (!hello) return;
    admission_.admit(lane, *hello);
  } else if (event.writable) {
    lane.link->channel()->flush();
  }
  receive(lane);
}

void TlsDriver::receive(TlsLane& lane) {
  const bool goes_on = lanes_.receive(lane);
  if (lane.last.heard) lane.link->heard = now_;
  if (lane.last.more) lanes_.serve_again(lane);
  if (!goes_on) return links_.end_stream(lane);
  if (lane.can_receive() || lane.first()) return;
  // The lane waits for the frame that its pieces belong to, which most likely arrived on the first lane.
  TlsLane& first = lanes_.first_of(*lane.link);
  if (!first.over) receive(first);
  if (lane.can_receive()) lanes_.serve_again(lane);
}

bool TlsDriver::run_timers() {
  bool any = false;
  while (const auto token = driver_.timers.take_due(now_)) {
    any = true;
    if (TlsLane* const lane = lanes_.find(*token)) {
      const Error late = lane->timed_out();
      const bool dialing = lane->stage() == TlsLane::Stage::kConnecting;
      if (dialing && dialer_.redial(*lane, late)) continue;
      links_.fail(*lane, dialing ? TlsDialer::with_earlier(*lane, late) : late);
    } else {
      listener_.end_pause(*token);
    }
  }
  return any;
}

void TlsDriver::beat() {
  for (const std::uint64_t token : links_.beat(now_)) {
    // This side may not have polled for a while, or only 64 other sockets: the peer's bytes may wait to be read.
    if (const auto link = links_.find(token)) {
      const std::vector<std::uint64_t> lanes = link->lanes;
      for (const std::uint64_t lane : lanes) serve_socket({lane, true, false, false});
    }
    const auto link = links_.find(token);
    if (link && links_.is_silent(*link, now_)) links_.end_silent(*link);
  }
}

}  // namespace torchspan::net
