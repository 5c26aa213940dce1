#include <algorithm>
#include <fmt/format.h>
#include <openssl/rand.h>

#include "net/tls/tls_transport.h"

/// How TlsTransport drives its connections.
namespace torchspan::net {
namespace {

ChannelToken draw_token() {
  ChannelToken token;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(token.data()), static_cast<int>(token.size())) != 1) {
    throw Error(ErrorKind::kUnsupported, "the system's random source gave no bytes for a channel's token");
  }
  return token;
}

}  // namespace

TlsLane& TlsTransport::add_lane(Role role, std::string peer, std::uint8_t number, const LinkPtr& link) {
  const std::uint64_t token = next_token_.fetch_add(1, std::memory_order_relaxed);
  TlsLane& lane =
      *lanes_.emplace(token, std::make_unique<TlsLane>(token, role, std::move(peer), number)).first->second;
  lane.link = link;
  if (link) link->lanes.push_back(token);
  set_timer(lane, now_ + options_.handshake_timeout);
  return lane;
}

void TlsTransport::dial_first(TlsLane& lane) {
  try {
    start_dialing(lane);
  } catch (const Error& error) {
    if (!redial(lane)) fail(lane, error);
  }
}

void TlsTransport::dial_rest(TlsLink& link) {
  const LinkPtr kept = links_.at(link.token());
  for (std::uint8_t number = 1; number <= link.granted; ++number) {
    TlsLane& lane = add_lane(Role::kDialer, link.channel()->peer(), number, kept);
    try {
      start_dialing(lane);
    } catch (const Error&) {
      // The channel does without this one.
      drop(lane);
    }
  }
}

void TlsTransport::start_dialing(TlsLane& lane) {
  TlsLink& link = *lane.link;
  Dialed dialed = dial(link.addresses.at(link.address));
  auto session = std::make_shared<TlsSession>(
      context_, std::move(dialed.socket),
      TlsSession::Start{.role = Role::kDialer, .peer = lane.peer(), .host = link.place.host});
  lane.start(std::move(session), dialed.connected);
  lane.watched = lane.watches_writing = true;
  poller_->add(lane.session()->socket(), lane.token(), true);
}

bool TlsTransport::redial(TlsLane& lane) {
  TlsLink& link = *lane.link;
  if (!lane.first() || lane.stage() > TlsLane::Stage::kConnecting) return false;
  while (link.address + 1 < link.addresses.size()) {
    if (lane.watched) poller_->remove(lane.session()->socket());
    lane.watched = false;
    ++link.address;
    try {
      start_dialing(lane);
      return true;
    } catch (const Error&) {
    }
  }
  return false;
}

void TlsTransport::serve(const Poller::Event& event) {
  if (const auto found = lanes_.find(event.token); found != lanes_.end()) {
    handle(*found->second, event);
    return;
  }
  const auto listener = listeners_.find(event.token);
  if (listener != listeners_.end()) accept_from(listener->first, listener->second);
}

void TlsTransport::handle(TlsLane& lane, const Poller::Event& event) {
  const bool dialing = lane.stage() == TlsLane::Stage::kConnecting;
  try {
    step(lane, event);
  } catch (const Error& error) {
    if (!dialing || !redial(lane)) fail(lane, error);
    return;
  }
  if (!lane.link) {
    watch(lane, lane.session()->unsent() != 0);
    return;
  }
  go_on_with(*lane.link);
  review(*lane.link);
}

void TlsTransport::step(TlsLane& lane, const Poller::Event& event) {
  if (lane.over || lane.stage() == TlsLane::Stage::kResolving) return;
  if (lane.stage() == TlsLane::Stage::kConnecting) {
    if (!event.writable && !event.hung_up) return;
    finish_dial(lane.session()->socket(), lane.link->addresses.at(lane.link->address));
    lane.connected();
  }
  if (lane.stage() != TlsLane::Stage::kOpen) {
    if (event.writable) lane.session()->flush();
    const std::optional<LaneHello> hello = lane.meet(greeting_of(lane));
    if (!hello) return;
    meet(lane, *hello);
  } else if (event.writable) {
    lane.link->channel()->flush();
  }
  receive(lane);
}

void TlsTransport::receive(TlsLane& lane) {
  const bool goes_on = lane.receive({scratch_.get(), kScratchBytes}, handler_);
  if (lane.heard) lane.link->heard = now_;
  if (lane.more) backlog_.push_back(lane.token());
  if (!goes_on) return stream_ended(lane);
  if (lane.can_receive() || lane.first()) return;
  // The frame that tells what these pieces belong to is most likely there already.
  TlsLane& first = *lanes_.at(lane.link->token());
  if (!first.over) receive(first);
  if (lane.can_receive()) backlog_.push_back(lane.token());
}

LaneHello TlsTransport::greeting_of(const TlsLane& lane) const {
  LaneHello hello;
  if (lane.role() == Role::kListener) return hello;
  hello.lanes = static_cast<std::uint8_t>(tls_.lanes);
  hello.lane = lane.number();
  if (!lane.first()) hello.token = lane.link->shared_token;
  return hello;
}

void TlsTransport::meet(TlsLane& lane, const LaneHello& hello) {
  lane.role() == Role::kDialer ? be_admitted(lane, hello) : admit(lane, hello);
}

void TlsTransport::admit(TlsLane& lane, const LaneHello& hello) {
  if (hello.lane != 0) return admit_lane(lane, hello);
  LaneHello answer;
  answer.lanes = std::min(hello.lanes, static_cast<std::uint8_t>(tls_.lanes));
  answer.token = draw_token();
  lane.say(answer);
  check_version(hello, lane.peer());
  const auto link =
      std::make_shared<TlsLink>(make_channel(lane.peer(), lane.token()), lane.token(), false, options_);
  link->shared_token = answer.token;
  link->granted = answer.lanes;
  link->lanes.push_back(lane.token());
  if (links_.empty()) next_tick_ = now_ + tls_.heartbeat;
  links_.emplace(lane.token(), link);
  accepted_.emplace(answer.token, link.get());
  forget_unauthenticated(lane);
  lane.join(link, 0, 0);
  open_link(lane, link);
}

void TlsTransport::admit_lane(TlsLane& lane, const LaneHello& hello) {
  const auto found = accepted_.find(hello.token);
  const bool wanted = found != accepted_.end() && hello.lane <= found->second->granted &&
                      std::ranges::none_of(found->second->lanes, [&](std::uint64_t token) {
                        return lanes_.at(token)->number() == hello.lane;
                      });
  if (!wanted) {
    // Most likely its channel has just ended.
    throw Error(ErrorKind::kDisconnected,
                fmt::format("'{}' would join a channel that is not there (any more)", lane.peer()));
  }
  LaneHello answer;
  answer.lane = hello.lane;
  answer.token = hello.token;
  lane.say(answer);
  const LinkPtr link = links_.at(found->second->token());
  forget_unauthenticated(lane);
  set_timer(lane, std::nullopt);
  link->lanes.push_back(lane.token());
  join(lane, link, hello.lane);
}

void TlsTransport::join(TlsLane& lane, const LinkPtr& link, std::uint8_t number) {
  lane.join(link, number, link->channel()->add_lane(lane.session()));
}

void TlsTransport::be_admitted(TlsLane& lane, const LaneHello& hello) {
  const LinkPtr link = lane.link;
  check_version(hello, lane.peer());
  if (hello.lane != lane.number() || (!lane.first() && hello.token != link->shared_token)) {
    throw Error(ErrorKind::kInvalid, fmt::format("'{}' answered for another connection", lane.peer()));
  }
  if (!lane.first()) {
    set_timer(lane, std::nullopt);
    return join(lane, link, lane.number());
  }
  link->shared_token = hello.token;
  link->granted = std::min(hello.lanes, static_cast<std::uint8_t>(tls_.lanes));
  lane.join(link, 0, 0);
  open_link(lane, link);
  dial_rest(*link);
}

void TlsTransport::stream_ended(TlsLane& lane) {
  TlsLink& link = *lane.link;
  lane.over = true;
  watch(lane, false);
  // A peer that left closes all its connections, and what comes last over one may arrive after another's end.
  const bool all =
      std::ranges::all_of(link.lanes, [&](std::uint64_t token) { return lanes_.at(token)->over; });
  if (all || (lane.first() && !(link.is_leaving() && !link.heard_goodbye()))) throw link.end_of_stream();
  TlsLane& first = *lanes_.at(link.token());
  if (!first.timer) set_timer(first, now_ + options_.linger);
}

void TlsTransport::fail(TlsLane& lane, const Error& reason) {
  const bool is_open = lane.stage() == TlsLane::Stage::kOpen;
  if (lane.link && (lane.first() || is_open)) return end(*lane.link, reason);
  if (lane.link) return drop(lane);  // the channel does without this one
  const std::string peer = lane.peer();
  const bool late = lane.stage() == TlsLane::Stage::kHello && reason.kind() == ErrorKind::kDisconnected;
  drop(lane);
  if (!late) handler_.on_refused(peer, reason);
}

void TlsTransport::drop(TlsLane& lane) {
  set_timer(lane, std::nullopt);
  forget_unauthenticated(lane);
  if (lane.watched) poller_->remove(lane.session()->socket());
  if (lane.link) std::erase(lane.link->lanes, lane.token());
  lanes_.erase(lane.token());
}

void TlsTransport::watch(TlsLane& lane, bool writing) {
  if (!lane.session()) return;
  writing |= lane.stage() == TlsLane::Stage::kConnecting;
  const bool wanted = !lane.over && (writing || lane.can_receive());
  const int socket = lane.session()->socket();
  if (wanted != lane.watched) {
    wanted ? poller_->add(socket, lane.token(), writing) : poller_->remove(socket);
  } else if (wanted && writing != lane.watches_writing) {
    poller_->change(socket, lane.token(), writing);
  }
  lane.watched = wanted;
  lane.watches_writing = writing;
}

void TlsTransport::go_on_with(TlsLink& link) {
  // What waited for another lane may have its bytes in memory, where the system does not report them.
  for (const std::uint64_t token : link.lanes) {
    const TlsLane& lane = *lanes_.at(token);
    if (lane.stage() == TlsLane::Stage::kOpen && !lane.watched && !lane.over && lane.can_receive()) {
      backlog_.push_back(token);
    }
  }
}

void TlsTransport::forget_unauthenticated(TlsLane& lane) {
  if (unauthenticated_.erase(lane.token()) != 0) resume_listeners();
}

}  // namespace torchspan::net
