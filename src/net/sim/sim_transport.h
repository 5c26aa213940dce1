#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torchspan/detail/net/transport.h>

#include "net/api/sim.h"
#include "net/framing.h"
#include "net/handshake.h"
#include "net/sim/sim_network.h"
#include "net/stream/driver_context.h"

namespace torchspan::net {

/// One end of a simulated connection. The network's mutex guards what is marked "guarded"; the rest is for
/// the driver.
class SimChannel final : public Channel, public std::enable_shared_from_this<SimChannel> {
 public:
  struct Start {
    std::shared_ptr<SimNetwork::Impl> network;
    std::shared_ptr<SimNode> node;
    std::shared_ptr<SimLink> outward;
    std::shared_ptr<SimLink> inward;
    std::uint64_t id;
    Deadline deadline;  ///< of the handshake, for the side that dials
    bool dialed;
  };
  SimChannel(Start start, const TransportOptions& options);

  void send(BytesView header, std::span<const Segment> segments) override;
  std::size_t unsent_bytes() const override;
  bool opened() const override;
  void close() override;
  bool carries_device_memory() const override { return limits_.device_memory; }
  std::string peer() const override { return peer_; }

  SimNode& node() const { return *start_.node; }
  const std::shared_ptr<SimLink>& outward() const { return start_.outward; }
  const std::shared_ptr<SimLink>& inward() const { return start_.inward; }
  std::uint64_t id() const { return start_.id; }
  bool dialed() const { return start_.dialed; }
  Deadline deadline() const { return start_.deadline; }

  /// The peer received or lost `size` bytes of this end.
  void arrived(std::size_t size) { under_way_.fetch_sub(size, std::memory_order_relaxed); }
  /// The handshake is done: sends what is queued.
  void open();
  /// Ends this end and notifies the peer.
  void end(const Error& reason);

  struct State {
    bool closing = false;       ///< close() was called
    bool said_goodbye = false;  ///< and the goodbye was sent
    bool ended = false;         ///< this end is closed, or its transport was killed
  };
  State state() const;

  Handshake handshake;
  bool heard_goodbye = false;
  bool handshake_pending = true;  ///< the transport clears it at the end of the handshake

 private:
  Packet copy_message(BytesView header, std::span<const Segment> segments) const;
  std::size_t unsent_locked() const TORCHSPAN_REQUIRES(network_.mutex);
  void check_room(std::size_t size) const TORCHSPAN_REQUIRES(network_.mutex);

  const Start start_;
  SimNetwork::Impl& network_;  ///< start_.network
  const std::string peer_;
  const FrameLimits limits_;
  const std::uint64_t max_unsent_;
  std::atomic<std::size_t> under_way_{0};  ///< bytes sent that the peer's poll() has not taken yet
  bool open_ TORCHSPAN_GUARDED_BY(network_.mutex) = false;
  bool closing_ TORCHSPAN_GUARDED_BY(network_.mutex) = false;
  /// Why the channel ended.
  std::optional<std::string> ended_ TORCHSPAN_GUARDED_BY(network_.mutex);
  /// Until the handshake is done.
  std::deque<Packet> queued_ TORCHSPAN_GUARDED_BY(network_.mutex);
};

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

  const std::shared_ptr<SimNetwork::Impl> network_;
  Handler& handler_;
  const TransportOptions options_;
  const std::unique_ptr<Poller> poller_;
  const std::shared_ptr<SimNode> node_;
  Channels channels_;
  Timers timers_;
  std::map<std::uint64_t, TimePoint> unauthenticated_;  ///< tokens and times of arrival, the oldest first
  std::deque<Arrival> backlog_;  ///< connection attempts that wait until there are fewer
};

}  // namespace torchspan::net
