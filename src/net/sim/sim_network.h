#pragma once
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "net/api/sim.h"
#include "net/sim/fault_injection.h"
#include "net/sim/sim_link.h"

namespace torchspan::net {

/// A packet that reached a transport, for its next poll().
struct Arrival {
  std::shared_ptr<SimChannel> channel;  ///< null for a connection attempt
  std::shared_ptr<SimChannel> source;
  Packet packet;
};

/// The network's record of a transport. The network's mutex guards all fields but `name`.
struct SimNode {
  SimNode(std::string node_name, Poller* node_poller) : name(std::move(node_name)), poller(node_poller) {}

  const std::string name;
  Poller* poller;     ///< null once the transport is destroyed
  bool alive = true;  ///< false once killed or destroyed
  bool listening = false;
  std::deque<Arrival> inbox;
  std::vector<std::shared_ptr<SimChannel>> new_channels;  ///< dialed, not yet taken by the driver
  std::vector<std::shared_ptr<SimChannel>> reviews;       ///< closed since the last poll()

  void wake() {
    if (poller != nullptr) poller->wake();
  }
};

/// Carries packets between transports at their times. The whole network has one mutex, because simulated
/// threads run one at a time.
class SimNetwork::Impl : public std::enable_shared_from_this<Impl> {
 public:
  static const std::shared_ptr<Impl>& of(const SimNetwork& network) { return network.impl_; }
  Impl(SimExecutor& simulated, Options chosen) : executor(simulated), options_(chosen) {}

  SimExecutor& executor;
  FaultInjection faults;
  Mutex mutex;

  /// Adds a new transport. Throws kInvalid if one with that name is alive.
  void enter(const std::shared_ptr<SimNode>& node) TORCHSPAN_REQUIRES(mutex);
  void leave(const SimNode& node) TORCHSPAN_REQUIRES(mutex);
  std::shared_ptr<SimLink> make_wire(std::string from, std::string to) TORCHSPAN_REQUIRES(mutex);
  /// Puts a packet on a link; it arrives after the current latency and jitter.
  void transmit(const std::shared_ptr<SimLink>& link, Packet packet) TORCHSPAN_REQUIRES(mutex);
  /// Like transmit(), for a message: also draws drops and duplicates, and counts the message.
  void transmit_message(const std::shared_ptr<SimLink>& link, Packet packet) TORCHSPAN_REQUIRES(mutex);
  std::uint64_t next_number() TORCHSPAN_REQUIRES(mutex) { return counters_.sent++; }
  std::uint64_t next_id() TORCHSPAN_REQUIRES(mutex) { return next_id_++; }
  void count_delivered() TORCHSPAN_REQUIRES(mutex) { ++counters_.delivered; }
  void count_dropped() TORCHSPAN_REQUIRES(mutex) { ++counters_.dropped; }

  void set_options(Options options);
  void unblock();
  void kill(const std::string& name);
  void sever(const std::string& a, const std::string& b);
  void cut(const std::string& a, const std::string& b);
  void heal(const std::string& a, const std::string& b);
  Counters counters();

 private:
  using Names = std::pair<std::string, std::string>;
  static Names link_of(const std::string& a, const std::string& b) {
    return a < b ? Names{a, b} : Names{b, a};
  }

  bool by_chance(double chance);
  void schedule(const std::shared_ptr<SimLink>& link, TimePoint when);
  void schedule_all() TORCHSPAN_REQUIRES(mutex);
  void pump(const std::shared_ptr<SimLink>& link);
  void arrive(const SimLink& link, Packet packet) TORCHSPAN_REQUIRES(mutex);
  void take_call(const SimLink& link, Packet packet) TORCHSPAN_REQUIRES(mutex);

  Options options_ TORCHSPAN_GUARDED_BY(mutex);
  Counters counters_ TORCHSPAN_GUARDED_BY(mutex);
  std::uint64_t next_id_ TORCHSPAN_GUARDED_BY(mutex) = 1;
  std::map<std::string, std::shared_ptr<SimNode>> nodes_ TORCHSPAN_GUARDED_BY(mutex);
  std::vector<std::weak_ptr<SimLink>> links_ TORCHSPAN_GUARDED_BY(mutex);
  std::set<Names> cuts_ TORCHSPAN_GUARDED_BY(mutex);
};

}  // namespace torchspan::net
