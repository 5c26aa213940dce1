#include "net/tls/tls_links.h"

#include <algorithm>
#include <exception>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "net/channel_errors.h"
#include "net/stream/socket.h"
#include "net/tls/record_cipher.h"

namespace torchspan::net {

void TlsGreeting::say(TlsSession& session, const LaneHello& hello) const {
  // The hello is sent in a separate packet, which arrives even if the probe does not.
  for (Bytes& bytes : std::array{encode(hello), Bytes(probe_bytes(hello))}) {
    const iovec place{bytes.data(), bytes.size()};
    if (bytes.empty() || session.write(std::span(&place, 1)) == static_cast<ssize_t>(bytes.size())) continue;
    throw Error(ErrorKind::kDisconnected, fmt::format("'{}' disconnected during the handshake", peer_));
  }
}

std::optional<LaneHello> TlsGreeting::hear(TlsSession& session, const LaneHello& mine) {
  if (!hello_) {
    if (!fill(session, bytes_, filled_)) return std::nullopt;
    hello_ = decode_lane_hello(bytes_, peer_);
    if (role_ == Role::kDialer) check_agreement(mine, *hello_, peer_);
  }
  Bytes probe(probe_bytes(*hello_));
  if (!fill(session, probe, probed_)) return std::nullopt;
  return hello_;
}

bool TlsGreeting::fill(TlsSession& session, std::span<std::byte> bytes, std::size_t& filled) {
  while (filled < bytes.size()) {
    const iovec place{bytes.data() + filled, bytes.size() - filled};
    const TlsSession::Got got = session.read(std::span(&place, 1));
    filled += got.size;
    if (got.ended || got.broken != 0) throw handshake_broken(peer_);
    if (!got.more) break;
  }
  return filled == bytes.size();
}

namespace {
constexpr std::uint64_t kMaxHeldBytes = 64 << 20;
}  // namespace

TlsLink::TlsLink(std::shared_ptr<TlsChannel> channel, std::uint64_t token, bool dialed,
                 const TransportOptions& options)
    : channel_(std::move(channel)),
      token_(token),
      dialed_(dialed),
      parser_(limits_of(options), options.allocator, FrameDialect::kLanes),
      assembly_(options.allocator) {}

void TlsLink::take(std::size_t direct, BytesView rest, Handler& handler) {
  std::exception_ptr failure;
  try {
    parser_.received(direct, messages_);
    parser_.feed(rest, messages_);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    sort();
  } catch (...) {
    failure = std::current_exception();
  }
  deliver(handler);
  if (failure) throw cut_off(channel_->peer(), to_error(failure));
}

void TlsLink::sort() {
  std::vector<FrameParser::Striped> striped = parser_.take_striped();
  if (striped.empty() && assembly_.empty()) return;
  std::vector<Message> came = std::exchange(messages_, {});
  auto next = striped.begin();
  for (std::size_t i = 0; i < came.size(); ++i) {
    if (next != striped.end() && next->index == i) {
      assembly_.expect(std::move(came[i]), std::move(next++->sizes));
    } else {
      assembly_.add(std::move(came[i]));
    }
  }
  assembly_.take(messages_);
}

void TlsLink::deliver_assembled(Handler& handler) {
  assembly_.take(messages_);
  deliver(handler);
}

void TlsLink::deliver(Handler& handler) {
  const bool several = messages_.size() > 1;
  if (several) channel_->cork();
  for (Message& message : messages_) handler.on_message(channel_, std::move(message));
  messages_.clear();
  if (several) channel_->uncork();
}

bool TlsLink::is_full() const { return assembly_.held_bytes() > kMaxHeldBytes; }

Error TlsLink::end_of_stream() const {
  const std::string peer = channel_->peer();
  if (channel_->state().said_goodbye) return closed_here(peer);
  if (heard_goodbye()) return closed_by_peer(peer);
  return stream_ended(peer, parser_.mid_frame() || !assembly_.empty());
}

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

std::optional<LaneHello> TlsLane::handshake(const LaneHello& mine) {
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
  if (link->channel()->state().closing) return not_acknowledged(peer_);
  return peer_gone(peer_, "one of its connections ended without the others");
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
  return handshake_late(peer_);
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
      throw cut_off(link->channel()->peer(), error);
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

namespace {

/// Room for one record, so that none is copied twice.
constexpr std::size_t kTlsScratchBytes = kMostRecordBytes;

}  // namespace

TlsLanes::TlsLanes(const DriverContext& driver, Listener& listener)
    : driver_(driver),
      listener_(listener),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(kTlsScratchBytes)) {}

TlsLane& TlsLanes::add(std::unique_ptr<TlsLane> owned, const std::shared_ptr<TlsLink>& link,
                       Deadline deadline) {
  TlsLane& lane = *owned;
  lanes_.emplace(lane.token(), std::move(owned));
  lane.link = link;
  if (link) link->lanes.push_back(lane.token());
  const Deadline latest = driver_.executor.deadline_in(driver_.options.handshake_timeout);
  driver_.timers.set(lane.token(), earlier(latest, deadline).at());
  return lane;
}

TlsLane* TlsLanes::find(std::uint64_t token) const {
  const auto found = lanes_.find(token);
  return found == lanes_.end() ? nullptr : found->second.get();
}

bool TlsLanes::have_all_ended(const TlsLink& link) const {
  return std::ranges::all_of(link.lanes, [&](std::uint64_t token) { return at(token).over; });
}

bool TlsLanes::has_number(const TlsLink& link, std::uint8_t number) const {
  return std::ranges::any_of(link.lanes, [&](std::uint64_t token) { return at(token).number() == number; });
}

void TlsLanes::end_handshake(const TlsLane& lane) {
  driver_.timers.set(lane.token(), std::nullopt);
  listener_.remove_unauthenticated(lane.token());
}

void TlsLanes::start_linger(const TlsLane& lane) {
  if (driver_.timers.of(lane.token())) return;
  driver_.timers.set(lane.token(), driver_.executor.now() + driver_.options.linger);
}

void TlsLanes::watch(TlsLane& lane, bool writing) {
  if (!lane.session()) return;
  writing |= lane.stage() == TlsLane::Stage::kConnecting;
  const bool wanted = !lane.over && (writing || lane.can_receive());
  const int socket = lane.session()->socket();
  if (wanted != lane.watched) {
    wanted ? driver_.poller.add(socket, lane.token(), writing) : driver_.poller.remove(socket);
  } else if (wanted && writing != lane.watches_writing) {
    driver_.poller.change(socket, lane.token(), writing);
  }
  lane.watched = wanted;
  lane.watches_writing = writing;
}

void TlsLanes::unwatch(TlsLane& lane) {
  if (lane.watched) driver_.poller.remove(lane.session()->socket());
  lane.watched = false;
}

bool TlsLanes::receive(TlsLane& lane) {
  return lane.receive({scratch_.get(), kTlsScratchBytes}, driver_.handler);
}

void TlsLanes::drop(TlsLane& lane) {
  end_handshake(lane);
  unwatch(lane);
  if (lane.link) std::erase(lane.link->lanes, lane.token());
  lanes_.erase(lane.token());
}

void TlsLanes::serve_resumed(const TlsLink& link) {
  // A lane that waited may have its bytes in memory already, which the poller does not report.
  for (const std::uint64_t token : link.lanes) {
    const TlsLane& lane = at(token);
    const bool waited = lane.last.waits || !lane.watched;  // the poller may watch it for writing
    if (lane.stage() == TlsLane::Stage::kOpen && waited && !lane.over && lane.can_receive()) {
      serve_again(lane);
    }
  }
}

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
      return end(link, state.closing ? closed_here(peer) : closed_by_peer(peer));
    }
    if (state.said_goodbye) lanes_.start_linger(lanes_.first_of(link));
  }
  for (const std::uint64_t token : link.lanes) {
    TlsLane& lane = lanes_.at(token);
    const bool flushing = lane.stage() == TlsLane::Stage::kOpen && (state.flushing >> lane.slot & 1) != 0;
    try {
      lanes_.watch(lane, flushing || (lane.session() && lane.session()->unsent() != 0));
    } catch (const Error& error) {  // the system watches no more sockets
      return end(link, error);
    }
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
  end(link, link.heard_goodbye() ? closed_by_peer(peer) : peer_gone(peer, why));
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
