#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "net/api/stream.h"
#include "net/stream/connection.h"
#include "net/stream/driver_context.h"
#include "net/stream/listener.h"
#include "net/stream/outbox.h"

namespace torchspan::net {

/// Transport over the sockets of one host, or over lanes beside them. Everything but the request queue, the
/// tokens and the atomics belongs to the thread in poll() or wait().
class StreamTransport final : public PolledTransport {
 public:
  /// Makes the lanes of connections over Unix sockets.
  using MakeLane = std::function<std::unique_ptr<Lane>(Role role)>;

  StreamTransport(Executor& executor, Handler& handler, TransportOptions options, MakeLane make_lane = {});
  ~StreamTransport() override;

  std::string listen(const std::string& address) override;
  bool can_reach(const std::string& address) const override;
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override;
  bool poll() override;
  void wait(Deadline deadline) override;
  void wake() override;
  bool prepare_sleep(Deadline& until) override;
  void end_sleep(bool ready) override;
  int descriptor() const override { return poller_->descriptor(); }

 private:
  using Connections = std::map<std::uint64_t, std::unique_ptr<Connection>>;

  std::shared_ptr<StreamChannel> make_channel(std::string peer, std::uint64_t token) const;

  std::unique_ptr<Lane> make_lane(const Address& address, Role role) const;
  bool must_poll_sockets() const;
  bool serve_lanes();
  bool serve_lane(Connection& connection);

  bool take_requests();
  void adopt(std::unique_ptr<Connection> connection);
  void serve(const Poller::Event& event);
  void handle(Connection& connection, const Poller::Event& event);
  /// The peer proved itself, or the connection ends: it does not count as an unauthenticated peer any longer.
  void end_handshake(Connection& connection);
  bool run_timers();
  /// Watches the connection for what its state asks for; ends it when there is nothing left to do.
  void review(Connection& connection);
  void end(Connection& connection, Error reason);
  void end_broken(Connection& connection, const std::string& why);
  void accept(Descriptor socket, const Address& listener);

  Executor& executor_;
  Handler& handler_;
  const TransportOptions options_;
  const MakeLane make_lane_;
  const std::unique_ptr<Poller> poller_;
  const std::shared_ptr<StreamRequestQueue> request_queue_;
  TokenCounter tokens_;
  Timers timers_;
  Listener listener_;
  std::atomic<bool> woken_{false};

  Connections connections_;
  std::vector<Connection*> sharing_;  ///< the connections whose frames use a lane
  std::size_t polls_ = 0;             ///< since the sockets were polled
  std::array<Poller::Event, 64> events_;
  std::size_t ready_ = 0;  ///< events that wait() left for poll()
  const std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace torchspan::net
