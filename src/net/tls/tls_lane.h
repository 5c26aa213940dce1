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
#include "net/tls/tls_link.h"
#include "net/tls/tls_session.h"

namespace torchspan::net {

/// The driver's half of one connection of a channel: its stage and what it is receiving. Used by the thread
/// in poll(). Methods that throw Error thereby tell how the connection ends.
class TlsLane {
 public:
  enum class Stage : std::uint8_t { kResolving, kConnecting, kTls, kHello, kOpen };

  TlsLane(std::uint64_t token, Role role, std::string peer, std::uint8_t number)
      : token_(token), role_(role), peer_(std::move(peer)), number_(number) {}

  std::uint64_t token() const { return token_; }
  Role role() const { return role_; }
  const std::string& peer() const { return peer_; }
  /// 0 for the lane that makes a channel, and for callers that have not said which they are.
  std::uint8_t number() const { return number_; }
  bool first() const { return number_ == 0; }
  Stage stage() const { return stage_; }
  const std::shared_ptr<TlsSession>& session() const { return session_; }

  /// A new connection; it is being made, or is there.
  void start(std::shared_ptr<TlsSession> session, bool connected);
  void connected() { stage_ = Stage::kTls; }
  /// Goes on with TLS and the greetings. The peer's greeting, once it is there; a dialer says its own,
  /// `mine`, first.
  std::optional<LaneHello> meet(const LaneHello& mine);
  void say(const LaneHello& hello);
  /// It is `number` of `link` from now on, and open.
  void join(std::shared_ptr<TlsLink> link, std::uint8_t number, std::size_t slot);

  /// Receives and delivers what is there, for a while; `scratch` is memory to receive into. False at the
  /// stream's end.
  bool receive(std::span<std::byte> scratch, Handler& handler);
  /// Whether what the peer sends next can be taken now.
  bool can_receive() const;

  std::shared_ptr<TlsLink> link;   ///< none for a caller that has not said hello
  std::size_t slot = 0;            ///< its bit in TlsChannel::State::flushing
  bool heard = false;              ///< bytes came in the last receive()
  bool more = false;               ///< there is more to receive that the system does not report
  bool over = false;               ///< nothing comes any more
  bool watched = false;            ///< what the poller was told
  bool watches_writing = false;    ///< what the poller was told
  std::optional<TimePoint> timer;  ///< when the connection has to be done with its stage

 private:
  bool receive_frames(std::span<std::byte> scratch, Handler& handler);
  bool receive_pieces(Handler& handler);
  bool note(const TlsSession::Got& got);

  const std::uint64_t token_;
  const Role role_;
  const std::string peer_;
  std::uint8_t number_;
  Stage stage_ = Stage::kResolving;
  std::shared_ptr<TlsSession> session_;
  std::array<std::byte, kLaneHelloBytes> hello_;
  std::size_t hello_filled_ = 0;
  std::optional<PieceReader> pieces_;
};

}  // namespace torchspan::net
