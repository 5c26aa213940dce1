#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "net/tls/hello.h"
#include "net/tls/pieces.h"
#include "net/tls/tls_greeting.h"
#include "net/tls/tls_link.h"
#include "net/tls/tls_session.h"

namespace torchspan::net {

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
  std::optional<LaneHello> meet(const LaneHello& mine);
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

}  // namespace torchspan::net
