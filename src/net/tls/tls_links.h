#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "net/api/tls.h"
#include "net/framing.h"
#include "net/stream/driver_context.h"
#include "net/stream/listener.h"
#include "net/tls/hello.h"
#include "net/tls/pieces.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_channel.h"
#include "net/tls/tls_session.h"

namespace torchspan::net {

/// The greetings of a new connection, the last bytes inside TLS. The dialer's comes first. For the driver.
class TlsGreeting {
 public:
  TlsGreeting(Role role, std::string peer) : role_(role), peer_(std::move(peer)) {}

  /// Sends `hello` and the probe that follows it. Throws kDisconnected.
  void say(TlsSession& session, const LaneHello& hello) const;
  /// Receives what is there of the peer's greeting; returns its hello once all of it has arrived. Throws what
  /// the hello's decoder throws, kDisconnected, and at a dialer as check_agreement() with `mine`.
  std::optional<LaneHello> hear(TlsSession& session, const LaneHello& mine);
  /// Whether the peer's hello has arrived, perhaps without the probe.
  bool heard_hello() const { return hello_.has_value(); }

 private:
  bool fill(TlsSession& session, std::span<std::byte> bytes, std::size_t& filled);

  const Role role_;
  const std::string peer_;
  std::array<std::byte, kLaneHelloBytes> bytes_;
  std::size_t filled_ = 0;
  std::size_t probed_ = 0;  ///< bytes of the probe that have arrived
  std::optional<LaneHello> hello_;
};

/// The driver's half of a channel: what was received and is not delivered yet. For the driver. If a method
/// throws Error, the channel ends with it.
class TlsLink {
 public:
  TlsLink(std::shared_ptr<TlsChannel> channel, std::uint64_t token, bool dialed,
          const TransportOptions& options);

  const std::shared_ptr<TlsChannel>& channel() const { return channel_; }
  std::uint64_t token() const { return token_; }
  bool dialed() const { return dialed_; }

  /// The places of the first lane's next bytes, as FrameParser::targets().
  std::size_t targets(std::span<iovec> places) { return parser_.targets(places); }
  /// The caller received `direct` bytes into those places, and `rest` after them; delivers complete messages.
  void take(std::size_t direct, BytesView rest, Handler& handler);
  Assembly& assembly() { return assembly_; }
  /// Delivers messages that pieces have completed.
  void deliver_assembled(Handler& handler);

  /// Whether so many bytes wait behind a striped message that the first lane must wait, too.
  bool is_full() const;
  /// The peer said goodbye, and all messages before it are delivered.
  bool heard_goodbye() const { return parser_.goodbye() && assembly_.empty(); }
  /// The peer said goodbye; pieces may still be missing.
  bool is_leaving() const { return parser_.goodbye(); }
  /// Why the channel ends at the end of the peer's stream.
  Error end_of_stream() const;

  bool open = false;                  ///< the peer proved itself
  ChannelToken shared_token{};        ///< both sides' name for the channel
  std::uint8_t granted = 0;           ///< lanes beside the first
  TimePoint heard{};                  ///< when the last bytes arrived
  std::vector<std::uint64_t> lanes;   ///< tokens of its connections, the first lane's first
  std::vector<Address> addresses;     ///< to dial, in this order
  std::vector<std::string> failures;  ///< why addresses before that one could not be dialed
  std::size_t address = 0;            ///< index of the address that is being dialed, or that answered
  std::optional<TimePoint> dialed_until = {};  ///< limit of all addresses together
  TlsPlace place;                              ///< the place that was dialed

 private:
  void sort();
  void deliver(Handler& handler);

  const std::shared_ptr<TlsChannel> channel_;
  const std::uint64_t token_;
  const bool dialed_;
  FrameParser parser_;
  Assembly assembly_;
  std::vector<Message> messages_;
};

/// The driver's half of one connection of a channel: its stage and what it is receiving. For the driver. If a
/// method throws Error, the connection ends with it.
class TlsLane {
 public:
  enum class Stage : std::uint8_t { kResolving, kConnecting, kTls, kHello, kOpen };
  struct Received {
    bool heard = false;  ///< bytes came
    bool more = false;   ///< there is more that the poller does not report
    bool waits = false;  ///< bytes that are left must wait for another lane
  };

  TlsLane(std::uint64_t token, Role role, std::string peer, std::uint8_t number)
      : token_(token), role_(role), peer_(std::move(peer)), number_(number), greeting_(role, peer_) {}

  std::uint64_t token() const { return token_; }
  Role role() const { return role_; }
  const std::string& peer() const { return peer_; }
  /// 0 for the lane that makes a channel, and for a peer that has not sent its greeting.
  std::uint8_t number() const { return number_; }
  bool first() const { return number_ == 0; }
  Stage stage() const { return stage_; }
  const std::shared_ptr<TlsSession>& session() const { return session_; }

  /// Uses a new connection, which is `connected` or is being made.
  void start(std::shared_ptr<TlsSession> session, bool connected);
  void connected() { stage_ = Stage::kTls; }
  /// Continues the TLS handshake and the greetings: a dialer sends its own, `mine`, first. Returns the peer's
  /// greeting once it has arrived.
  std::optional<LaneHello> handshake(const LaneHello& mine);
  void say(const LaneHello& hello) { greeting_.say(*session_, hello); }
  /// The lane is open, as lane `number` of `link`; adds a further lane to the channel.
  void join(std::shared_ptr<TlsLink> link, std::uint8_t number);

  /// Receives and delivers what is there, a few reads at most; `scratch` is memory to receive into. Returns
  /// false at the end of the stream.
  bool receive(std::span<std::byte> scratch, Handler& handler);
  /// False while the lane's next bytes must wait for another lane.
  bool can_receive() const;
  /// Why the timer that fired ends this lane.
  Error timed_out() const;

  std::shared_ptr<TlsLink> link;  ///< null for a peer that has not sent its greeting
  std::size_t slot = 0;           ///< the lane's bit in TlsChannel::State::flushing
  Received last;                  ///< what the last receive() found
  bool over = false;              ///< the stream has ended
  bool watched = false;           ///< by the poller
  bool watches_writing = false;   ///< by the poller, too

 private:
  bool receive_frames(std::span<std::byte> scratch, Handler& handler);
  bool receive_pieces(Handler& handler);
  bool note(const TlsSession::Got& got);
  Error handshake_timed_out() const;

  const std::uint64_t token_;
  const Role role_;
  const std::string peer_;
  std::uint8_t number_;
  Stage stage_ = Stage::kResolving;
  std::shared_ptr<TlsSession> session_;
  TlsGreeting greeting_;
  std::optional<PieceReader> pieces_;
};

/// The connections of a TLS transport: their timers, what the poller watches of them, and which have bytes that
/// the poller does not report. For the driver.
class TlsLanes {
 public:
  TlsLanes(const DriverContext& driver, Listener& listener);

  /// Adds a lane, to `link` if that is set. Its handshake must end within handshake_timeout and by `deadline`.
  TlsLane& add(std::unique_ptr<TlsLane> lane, const std::shared_ptr<TlsLink>& link = {},
               Deadline deadline = Deadline::never());
  /// Null if there is no lane with this token.
  TlsLane* find(std::uint64_t token) const;
  TlsLane& at(std::uint64_t token) const { return *lanes_.at(token); }
  TlsLane& first_of(const TlsLink& link) const { return at(link.token()); }
  bool empty() const { return lanes_.empty(); }
  bool have_all_ended(const TlsLink& link) const;
  bool has_number(const TlsLink& link, std::uint8_t number) const;

  /// The peer of the lane proved itself: the handshake has no time limit any more.
  void end_handshake(const TlsLane& lane);
  /// Unless the lane has a timer already, it must end within TransportOptions::linger.
  void start_linger(const TlsLane& lane);
  /// Makes the poller report what the lane waits for: bytes, if it can take them, and room if `writing`.
  void watch(TlsLane& lane, bool writing);
  void unwatch(TlsLane& lane);
  /// Receives and delivers what is there, as TlsLane::receive().
  bool receive(TlsLane& lane);
  /// Removes the lane, which closes its connection unless a channel still holds the session.
  void drop(TlsLane& lane);

  /// The next poll() serves the lane, whatever the poller reports.
  void serve_again(const TlsLane& lane) { backlog_.push_back(lane.token()); }
  /// As serve_again() for those lanes that waited for another one and can receive now.
  void serve_resumed(const TlsLink& link);
  bool has_backlog() const { return !backlog_.empty(); }
  std::vector<std::uint64_t> take_backlog() { return std::exchange(backlog_, {}); }

 private:
  const DriverContext driver_;
  Listener& listener_;
  std::map<std::uint64_t, std::unique_ptr<TlsLane>> lanes_;
  std::vector<std::uint64_t> backlog_;
  const std::unique_ptr<std::byte[]> scratch_;  ///< memory to receive into
};

/// The channels of a TLS transport: opens them, sends their heartbeats, and ends them with their lanes. For the
/// driver.
class TlsLinks {
 public:
  using LinkPtr = std::shared_ptr<TlsLink>;

  TlsLinks(const DriverContext& driver, const TlsOptions& tls, TlsLanes& lanes,
           std::shared_ptr<TlsRequestQueue> request_queue);

  /// Adds the link of a channel that this side dials; its first lane has the same token.
  LinkPtr add_dialed(std::shared_ptr<TlsChannel> channel, std::uint64_t token);
  /// Adds the link of a channel that a peer dialed with its first lane `lane`; `greeting` is this side's answer.
  LinkPtr add_accepted(const TlsLane& lane, const LaneHello& greeting);
  /// Null if there is none.
  LinkPtr find(std::uint64_t token) const;
  LinkPtr find_accepted(const ChannelToken& token) const;
  bool empty() const { return links_.empty(); }

  /// The peer of the first lane proved itself, so messages flow in both directions.
  void open(TlsLane& first, const LinkPtr& link);
  /// Watches the lanes for what the channel's state asks for; ends a channel that has nothing left to do.
  void review(TlsLink& link);
  /// Handles the end of a lane's stream. Throws the reason if its channel ends with it.
  void end_stream(TlsLane& lane);
  /// Ends a lane, and its channel unless that can do without it.
  void fail(TlsLane& lane, const Error& reason);
  /// Ends a channel. `at_once`: drops bytes that the peer has not received yet.
  void end(TlsLink& link, const Error& reason, bool at_once = false);
  /// Ends all channels without callbacks.
  void end_all(const Error& reason);

  /// When beat() is due.
  Deadline next_beat() const { return links_.empty() ? Deadline::never() : Deadline(next_beat_); }
  /// Sends a heartbeat on every idle channel; returns the tokens of channels whose peer is silent.
  std::vector<std::uint64_t> beat(TimePoint now);
  /// Whether the peer of an open channel was silent for dead_after.
  bool is_silent(const TlsLink& link, TimePoint now) const;
  void end_silent(TlsLink& link);

 private:
  void add(const LinkPtr& link);
  void end_broken(TlsLink& link, const std::string& why);

  const DriverContext driver_;
  const Duration heartbeat_;
  const Duration dead_after_;
  TlsLanes& lanes_;
  const std::shared_ptr<TlsRequestQueue> request_queue_;
  std::map<std::uint64_t, LinkPtr> links_;     ///< by the first lane's token, which is the channel's
  std::map<ChannelToken, TlsLink*> accepted_;  ///< open channels that further lanes may join
  TimePoint next_beat_{};
};

}  // namespace torchspan::net
