#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "net/api/sim.h"
#include "net/sim/sim_channel.h"
#include "net/sim/sim_network.h"

namespace torchspan::net {

/// A transport on a simulated network. Its fields belong to the thread in poll() or wait().
class SimTransport final : public Transport {
 public:
  SimTransport(std::shared_ptr<SimNetwork::Impl> network, const std::string& name, Handler& handler,
               TransportOptions options);
  ~SimTransport() override;

  std::string listen(const std::string& address) override;
  bool can_reach(const std::string& address) const override;
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override;
  bool poll() override;
  void wait(Deadline deadline) override;
  void wake() override { poller_->wake(); }

 private:
  using Channels = std::map<std::uint64_t, std::shared_ptr<SimChannel>>;

  bool take_requests();
  std::optional<Arrival> next_arrival();
  void handle(Arrival arrival);
  void welcome(const std::shared_ptr<SimChannel>& dialer, const Bytes& greeting);
  void welcome_backlog();
  /// Others are queued: limits the oldest handshake to kMinHandshakeTimeout.
  void shorten_oldest_handshake();
  void shake_hands(const std::shared_ptr<SimChannel>& channel, BytesView bytes);
  void deliver(const std::shared_ptr<SimChannel>& channel, Packet packet);
  Message receive(const std::shared_ptr<SimChannel>& channel, Packet packet) const;
  void review(const std::shared_ptr<SimChannel>& channel);
  void end(std::shared_ptr<SimChannel> channel, const Error& reason);
  Error gone(const SimChannel& channel) const;
  Error timed_out(const SimChannel& channel) const;
  bool end_all_if_killed();
  bool run_timers();
  void start_handshake(const std::shared_ptr<SimChannel>& channel);
  void end_handshake(SimChannel& channel);
  void set_timer(SimChannel& channel, std::optional<TimePoint> when);

  const std::shared_ptr<SimNetwork::Impl> network_;
  Handler& handler_;
  const TransportOptions options_;
  const std::unique_ptr<Poller> poller_;
  const std::shared_ptr<SimNode> node_;
  Channels channels_;
  std::set<std::pair<TimePoint, std::uint64_t>> timers_;
  std::map<std::uint64_t, TimePoint> unauthenticated_;  ///< tokens and times of arrival, the oldest first
  std::deque<Arrival> backlog_;  ///< connection attempts that wait until there are fewer
};

}  // namespace torchspan::net
