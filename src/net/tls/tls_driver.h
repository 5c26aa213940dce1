#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "net/api/tls.h"
#include "net/stream/driver_context.h"
#include "net/stream/listener.h"
#include "net/tls/hello.h"
#include "net/tls/tls_channel.h"
#include "net/tls/tls_context.h"
#include "net/tls/tls_links.h"

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
  void limit(TlsLane& lane, bool connected) const;
  /// Calls `dialing`; its errors say if the lane's host is this one by mistake.
  template <class Dialing>
  auto explained(const TlsLink& link, const Dialing& dialing) const;

  const DriverContext driver_;
  const std::shared_ptr<const TlsContext> context_;
  TlsLanes& lanes_;
};

/// Decides by the greetings of a new connection which channel it belongs to: a first lane makes a channel, a
/// further lane joins one. For the driver.
class TlsAdmission {
 public:
  TlsAdmission(const TlsOptions& tls, TlsLanes& lanes, TlsLinks& links, TlsDialer& dialer);

  /// What this side says, apart from the listener's answer.
  LaneHello greeting_of(const TlsLane& lane) const;
  /// The peer's greeting arrived: puts the lane into its channel. Throws why the lane ends instead.
  void admit(TlsLane& lane, const LaneHello& hello);

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

/// The part of a TLS transport that belongs to the thread in poll() or wait(): carries out requests of other
/// threads, and serves sockets, timers and heartbeats. A peer that dials is a lane without a link until it has
/// proved itself and sent its greeting.
class TlsDriver {
 public:
  TlsDriver(const DriverContext& driver, const TlsOptions& tls,
            std::shared_ptr<TlsRequestQueue> request_queue);

  void carry_out(TlsRequestQueue::Requests requests);
  /// Serves the sockets with `events`, lanes with bytes in memory, and what is due; true if there was any.
  bool serve(std::span<const Poller::Event> events);
  /// Whether serve() has something to do at once.
  bool has_work() const { return lanes_.has_backlog(); }
  /// When serve() has something to do without an event.
  Deadline next_due() const { return earlier(driver_.timers.next(), links_.next_beat()); }
  /// Without a connection, only the listening sockets can have events.
  bool has_connections() const { return !lanes_.empty(); }
  /// Ends all channels without callbacks.
  void end_all(const Error& reason) { links_.end_all(reason); }

 private:
  void carry_out(TlsRequest& request);
  void dial_first(TlsLane& lane);
  void accept(Descriptor socket, const Address& listener);
  void serve_socket(const Poller::Event& event);
  void serve_lane(TlsLane& lane, const Poller::Event& event);
  void step(TlsLane& lane, const Poller::Event& event);
  void receive(TlsLane& lane);
  bool run_timers();
  void beat();

  const DriverContext driver_;
  const std::shared_ptr<const TlsContext> context_;
  Listener listener_;
  TlsLanes lanes_;
  TlsLinks links_;
  TlsDialer dialer_;
  TlsAdmission admission_;
  TimePoint now_{};  ///< at the beginning of serve()
};

}  // namespace torchspan::net
