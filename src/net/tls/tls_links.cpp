#include "net/tls/tls_links.h"

#include <fmt/format.h>

namespace torchspan::net {

TlsLinks::TlsLinks(const DriverContext& driver, const TlsOptions& tls, TlsLanes& lanes,
                   std::shared_ptr<TlsRequestQueue> request_queue)
    : driver_(driver),
      heartbeat_(tls.heartbeat),
      dead_after_(tls.dead_after),
      lanes_(lanes),
      request_queue_(std::move(request_queue)) {}

void TlsLinks::add(const LinkPtr& link) {
  if (links_.empty()) next_beat_ = driver_.executor.now() + heartbeat_;
  links_.emplace(link->token(), link);
}

TlsLinks::LinkPtr TlsLinks::add_dialed(std::shared_ptr<TlsChannel> channel, std::uint64_t token) {
  auto link = std::make_shared<TlsLink>(std::move(channel), token, true, driver_.options);
  add(link);
  return link;
}

TlsLinks::LinkPtr TlsLinks::add_accepted(const TlsLane& lane, const LaneHello& greeting) {
  auto channel = make_tls_channel(lane.peer(), lane.token(), driver_.options, request_queue_);
  auto link = std::make_shared<TlsLink>(std::move(channel), lane.token(), false, driver_.options);
  link->shared_token = greeting.token;
  link->granted = greeting.lanes;
  link->lanes.push_back(lane.token());
  add(link);
  accepted_.emplace(greeting.token, link.get());
  return link;
}

TlsLinks::LinkPtr TlsLinks::find(std::uint64_t token) const {
  const auto found = links_.find(token);
  return found == links_.end() ? nullptr : found->second;
}

TlsLinks::LinkPtr TlsLinks::find_accepted(const ChannelToken& token) const {
  const auto found = accepted_.find(token);
  return found == accepted_.end() ? nullptr : find(found->second->token());
}

void TlsLinks::open(TlsLane& first, const LinkPtr& link) {
  first.join(link, 0);
  link->open = true;
  link->heard = driver_.executor.now();
  lanes_.end_handshake(first);
  if (!link->dialed()) driver_.handler.on_accepted(link->channel());
  link->channel()->open(first.session());
}

void TlsLinks::review(TlsLink& link) {
  const TlsChannel::State state = link.channel()->state();
  if (state.broken) return end_broken(link, *state.broken);
  if (link.open) {
    if (link.heard_goodbye() && (!state.closing || state.said_goodbye)) {
      const std::string peer = link.channel()->peer();
      return end(link, Error(ErrorKind::kDisconnected,
                             state.closing ? fmt::format("this side closed the channel to '{}'", peer)
                                           : fmt::format("'{}' closed the channel", peer)));
    }
    if (state.said_goodbye) lanes_.start_linger(lanes_.first_of(link));
  }
  for (const std::uint64_t token : link.lanes) {
    TlsLane& lane = lanes_.at(token);
    const bool flushing = lane.stage() == TlsLane::Stage::kOpen && (state.flushing >> lane.slot & 1) != 0;
    lanes_.watch(lane, flushing || (lane.session() && lane.session()->unsent() != 0));
  }
}

void TlsLinks::end_stream(TlsLane& lane) {
  TlsLink& link = *lane.link;
  lane.over = true;
  lanes_.watch(lane, false);
  // A peer that leaves closes all its connections. The last bytes of one may arrive after the end of another.
  const bool awaits_others = link.is_leaving() && !link.heard_goodbye();
  if (lanes_.have_all_ended(link) || (lane.first() && !awaits_others)) throw link.end_of_stream();
  lanes_.start_linger(lanes_.first_of(link));
}

void TlsLinks::fail(TlsLane& lane, const Error& reason) {
  const bool is_open = lane.stage() == TlsLane::Stage::kOpen;
  if (lane.link && (lane.first() || is_open)) return end(*lane.link, reason);
  if (lane.link) return lanes_.drop(lane);  // the channel does without this one
  const std::string peer = lane.peer();
  // A further lane of a channel that has just ended.
  const bool late = lane.stage() == TlsLane::Stage::kHello && reason.kind() == ErrorKind::kDisconnected;
  lanes_.drop(lane);
  if (!late) driver_.handler.on_refused(peer, reason);
}

void TlsLinks::end_broken(TlsLink& link, const std::string& why) {
  // Delivers what the peer sent before the connection broke.
  TlsLane& first = lanes_.first_of(link);
  try {
    while (link.open && lanes_.receive(first) && first.last.more) {
    }
  } catch (const Error&) {
  }
  const std::string peer = link.channel()->peer();
  end(link,
      Error(ErrorKind::kDisconnected, link.heard_goodbye() ? fmt::format("'{}' closed the channel", peer)
                                                           : fmt::format("'{}' is gone: {}", peer, why)));
}

void TlsLinks::end(TlsLink& link, const Error& reason, bool at_once) {
  const LinkPtr kept = links_.at(link.token());
  const bool announced = link.dialed() || link.open;
  // In a transport that dialed itself, both ends of the channel have the same shared token.
  if (const auto found = accepted_.find(link.shared_token);
      found != accepted_.end() && found->second == &link) {
    accepted_.erase(found);
  }
  links_.erase(link.token());
  link.channel()->end(reason);
  for (const std::uint64_t token : std::exchange(link.lanes, {})) {
    TlsLane& lane = lanes_.at(token);
    if (lane.session()) lane.session()->close(at_once);
    lanes_.drop(lane);
  }
  if (announced) driver_.handler.on_closed(link.channel(), reason);
}

void TlsLinks::end_all(const Error& reason) {
  for (const auto& [token, link] : links_) link->channel()->end(reason);
}

bool TlsLinks::is_silent(const TlsLink& link, TimePoint now) const {
  // A peer that said goodbye sends nothing while it waits for this side, for up to `linger`.
  const Duration limit = dead_after_ + (link.is_leaving() ? driver_.options.linger : Duration::zero());
  return link.open && now - link.heard > limit;
}

std::vector<std::uint64_t> TlsLinks::beat(TimePoint now) {
  next_beat_ = now + heartbeat_;
  std::vector<std::uint64_t> silent;
  for (const auto& [token, link] : links_) {
    if (link->open) link->channel()->beat();
    if (is_silent(*link, now)) silent.push_back(token);
  }
  return silent;
}

void TlsLinks::end_silent(TlsLink& link) {
  end(link,
      Error(ErrorKind::kDisconnected,
            fmt::format("'{}' was silent for {:.1f} s: its host is down or cut off, or no longer runs it",
                        link.channel()->peer(), to_seconds(dead_after_)))
          .with_elapsed(dead_after_),
      true);
}

}  // namespace torchspan::net
