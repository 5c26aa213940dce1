#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "net/stream/driver_context.h"
#include "net/stream/listener.h"
#include "net/tls/tls_lane.h"
#include "net/tls/tls_link.h"

namespace torchspan::net {

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

}  // namespace torchspan::net
