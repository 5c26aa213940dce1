#pragma once
#include <cstdint>

#include "net/api/tls.h"
#include "net/tls/hello.h"
#include "net/tls/tls_dialer.h"
#include "net/tls/tls_lanes.h"
#include "net/tls/tls_links.h"

namespace torchspan::net {

/// Decides by the greetings of a new connection which channel it belongs to: a first lane makes a channel, a
/// further lane joins one. For the driver.
class TlsAdmission {
 public:
  TlsAdmission(const TlsOptions& tls, TlsLanes& lanes, TlsLinks& links, TlsDialer& dialer);

  /// What this side says, apart from the listener's answer.
  LaneHello greeting_of(const TlsLane& lane) const;
  /// The peer's greeting arrived: puts the lane into its channel. Throws why the lane ends instead.
  void meet(TlsLane& lane, const LaneHello& hello);

 private:
  void accept_first(TlsLane& lane, const LaneHello& hello);
  void accept_further(TlsLane& lane, const LaneHello& hello);
  /// The listener answered this side's greeting.
  void take_answer(TlsLane& lane, const LaneHello& hello);
  void join(TlsLane& lane, const std::shared_ptr<TlsLink>& link, std::uint8_t number);

  const std::uint8_t most_lanes_;
  const std::uint64_t features_;
  TlsLanes& lanes_;
  TlsLinks& links_;
  TlsDialer& dialer_;
};

}  // namespace torchspan::net
