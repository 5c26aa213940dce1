#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/detail/core/metrics.h>

#include "net/api/ucx.h"
#include "net/stream/driver_context.h"
#include "net/tls/tls_transport.h"
#include "net/ucx/greeting.h"
#include "net/ucx/inbox.h"
#include "net/ucx/ucx_channel.h"
#include "net/ucx/ucx_worker.h"

namespace torchspan::net {

/// The driver's half of a channel: its TLS channel (the wire), and what arrived through UCX.
struct UcxLink {
  UcxLink(std::shared_ptr<UcxChannel> its_channel, std::uint64_t its_token, const TransportOptions& options,
          Handler& handler);
  /// Gives the peer the worker's address.
  void greet(const UcxWorker& worker);
  void say(const Bytes& note) const;

  const std::shared_ptr<UcxChannel> channel;
  const std::uint64_t token;
  UcxInbox inbox;
  bool dialed = false;
  std::uint64_t label = 0;  ///< the peer puts it into its messages
  std::shared_ptr<Channel> wire;
  std::optional<UcxGreeting> greeting;  ///< the peer's
  bool greeted = false;                 ///< this side's greeting was sent
  bool heard_hello = false;             ///< through UCX
  std::shared_ptr<UcxRoute> route;      ///< to the peer, once a hello went there
  bool open = false;                    ///< messages flow in both directions
  bool said_farewell = false;           ///< the peer's goodbye arrived through UCX
  bool heard_farewell = false;          ///< this side's goodbye arrived
  bool wire_gone = false;
};

/// Transport over UCX, beside a TLS transport with the scheme "ucx", which listens, dials, authenticates,
/// sends heartbeats and reports deaths. Each channel uses one channel of it. Everything but the request queue
/// and the worker belongs to the thread in poll() or wait().
class UcxTransport final : public PolledTransport {
 public:
  UcxTransport(Executor& executor, Handler& handler, TransportOptions options, UcxOptions ucx);
  ~UcxTransport() override;

  std::string listen(const std::string& address) override { return tls_.listen(address); }
  bool can_reach(const std::string& address) const override { return tls_.can_reach(address); }
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override;
  bool poll() override;
  void wait(Deadline deadline) override;
  void wake() override { tls_.wake(); }
  bool prepare_sleep(Deadline& until) override;
  void end_sleep(bool ready) override { tls_.end_sleep(ready); }
  int descriptor() const override { return tls_.descriptor(); }

 private:
  using LinkPtr = std::shared_ptr<UcxLink>;
  /// Receives the callbacks of the TLS transport.
  class Front final : public Handler {
   public:
    explicit Front(UcxTransport& transport) : transport_(transport) {}
    void on_accepted(const std::shared_ptr<Channel>& wire) override { transport_.wire_accepted(wire); }
    void on_message(const std::shared_ptr<Channel>& wire, Message message) override {
      transport_.note_arrived(wire, message);
    }
    void on_closed(const std::shared_ptr<Channel>& wire, const Error& reason) override {
      transport_.wire_closed(wire, reason);
    }
    void on_refused(const std::string& peer, const Error& reason) override {
      transport_.handler_.on_refused(peer, reason);
    }

   private:
    UcxTransport& transport_;
  };

  // Wires (ucx_wires.cpp)
  void dial(UcxRequest& request);
  void wire_accepted(const std::shared_ptr<Channel>& wire);
  void adopt(const LinkPtr& link, std::shared_ptr<Channel> wire);
  void note_arrived(const std::shared_ptr<Channel>& wire, const Message& message);
  void take_note(UcxLink& link, const Message& message);
  /// Makes the route through UCX. The side with the smaller worker address begins: UCX 1.13 sometimes aborts
  /// if both connect at once.
  void introduce(UcxLink& link);
  std::shared_ptr<UcxRoute> route_to(const Bytes& address);
  void wire_closed(const std::shared_ptr<Channel>& wire, const Error& reason);
  LinkPtr find(const std::shared_ptr<Channel>& wire) const;

  // Links (ucx_transport.cpp)
  std::shared_ptr<UcxChannel> make_channel(std::string peer, std::uint64_t token) const;
  /// Like prepare_sleep(), for UCX.
  bool may_sleep(Deadline& until);
  bool take_requests();
  /// Handles what UCX completed; returns whether there was anything.
  bool serve_worker();
  void take_arrivals(std::vector<UcxWorker::Arrival> arrivals);
  void drop(UcxWorker::Arrival& arrival);
  /// Runs `step`; if it throws, ends the link with that error.
  void attempt(const LinkPtr& link, const std::function<void()>& step);
  void fetch_and_deliver(UcxLink& link);
  void fetch_all(UcxLink& link);
  void lose(const UcxWorker::FailedRoute& failed);
  /// Ends the link or continues its goodbyes, as its state requires.
  void review(UcxLink& link);
  void end(UcxLink& link, const Error& reason);
  /// The part of end() that the destructor shares.
  void abandon(UcxLink& link, const Error& reason);
  bool run_timers();

  Executor& executor_;
  Handler& handler_;
  const TransportOptions options_;
  const UcxOptions ucx_;
  const std::size_t rendezvous_from_;
  Metrics own_metrics_;
  Counter& segments_;
  Counter& dropped_;
  Front front_;
  TlsTransport tls_;
  const std::shared_ptr<UcxRequestQueue> request_queue_;
  TokenCounter tokens_;
  UcxWorker worker_;

  std::map<std::uint64_t, LinkPtr> links_;
  std::unordered_map<const Channel*, LinkPtr> by_wire_;
  std::unordered_map<std::uint64_t, LinkPtr> by_label_;
  std::map<Bytes, std::shared_ptr<UcxRoute>> routes_;  ///< by the peer worker's address
  Timers timers_;
  TimePoint now_{};
};

}  // namespace torchspan::net
