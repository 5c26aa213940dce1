#pragma once
#include <memory>
#include <span>
#include <string>

#include "net/api/tls.h"
#include "net/stream/driver_context.h"
#include "net/stream/listener.h"
#include "net/tls/tls_admission.h"
#include "net/tls/tls_context.h"
#include "net/tls/tls_dialer.h"
#include "net/tls/tls_lanes.h"
#include "net/tls/tls_links.h"
#include "net/tls/tls_request.h"

namespace torchspan::net {

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
