#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "net/tls/hello.h"
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

}  // namespace torchspan::net
