#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "net/api/tls.h"
#include "net/stream/driver_context.h"
#include "net/tls/tls_channel.h"
#include "net/tls/tls_lanes.h"
#include "net/tls/tls_link.h"

namespace torchspan::net {

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
