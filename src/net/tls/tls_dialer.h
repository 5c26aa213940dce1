#pragma once
#include <memory>

#include "net/stream/driver_context.h"
#include "net/tls/tls_context.h"
#include "net/tls/tls_lane.h"
#include "net/tls/tls_lanes.h"

namespace torchspan::net {

/// Dials the connections of channels: the first lane at one address of the host after another, further lanes
/// at the address that answered. For the driver.
class TlsDialer {
 public:
  TlsDialer(const DriverContext& driver, std::shared_ptr<const TlsContext> context, TlsLanes& lanes);

  /// Dials the addresses of the lane's link until a connection is under way. Throws why the first address
  /// failed, if all do.
  void dial_first(TlsLane& lane);
  /// Dials the lanes that the peer granted; the channel does without those that fail.
  void dial_rest(const std::shared_ptr<TlsLink>& link);
  /// After a failure, dials the next address of a first lane that was not connected yet; false if there is none.
  bool redial(TlsLane& lane, const Error& failure);
  /// `failure` of the last address, and those of all addresses before it.
  static Error with_earlier(const TlsLane& lane, const Error& failure);
  /// The lane's connection attempt has ended. Throws why it failed.
  void finish(TlsLane& lane) const;

 private:
  void start(TlsLane& lane);
  /// Calls `dialing`; its errors say if the lane's host is this one by mistake.
  template <class Dialing>
  auto explained(const TlsLink& link, const Dialing& dialing) const;

  const DriverContext driver_;
  const std::shared_ptr<const TlsContext> context_;
  TlsLanes& lanes_;
};

}  // namespace torchspan::net
