#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/mutex.h>

#include "net/api/sim.h"

namespace torchspan::net {

/// What the injected faults do to one message.
struct Delivery {
  bool dropped = false;
  bool held = false;       ///< until unblock()
  bool hold_rest = false;  ///< everything after it is held, too
  Duration extra{0};
};

/// The predicates and counters of a simulated network. Predicates run without any lock held.
class FaultInjection {
 public:
  void block(SimPredicate match);
  void block_after(SimPredicate match);
  void unblock();
  void drop_if(SimPredicate match);
  void delay_if(SimPredicate match, Duration extra);
  void observe(std::function<void(const SimMessage&)> observer);

  /// Passes the message to the observer and the predicates.
  Delivery decide(const SimMessage& message);

 private:
  struct Rules {
    std::vector<SimPredicate> blocks;
    std::vector<std::pair<std::uint64_t, SimPredicate>> blocks_after;  ///< with an id; each applies once
    SimPredicate drop;
    SimPredicate delay;
    Duration extra{0};
    std::function<void(const SimMessage&)> observer;
  };
  template <class Change>
  void change(Change change);
  bool use_up(std::uint64_t id);

  mutable Mutex mutex_;
  std::shared_ptr<const Rules> rules_ TORCHSPAN_GUARDED_BY(mutex_) = std::make_shared<Rules>();
  std::uint64_t next_id_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

class SimChannel;

/// A packet on a simulated link.
struct Packet {
  enum class Kind : std::uint8_t {
    kDial,       ///< a connection attempt, with the dialer's greeting
    kHandshake,  ///< bytes of the handshake
    kMessage,
    kGoodbye,     ///< the sender closed its channel
    kEnd,         ///< the sender has ended
    kNoListener,  ///< the answer to a connection attempt where no transport listens
  };
  Kind kind;
  Bytes header;  ///< of a message, or the bytes of a handshake
  std::vector<Bytes> segments;
  std::vector<std::uint32_t> device_targets = {};  ///< of the segments
  Duration extra{0};                               ///< delay beyond the network's latency
  bool held = false;                               ///< until unblock()
  bool copied = false;                             ///< a duplicate, which does not count as unsent
  TimePoint due{};

  std::size_t size() const;
};

/// One direction of a link: packets in order of sending, each due at a time. Not thread-safe.
struct SimLink {
  std::string from;  ///< names of transports
  std::string to;
  std::weak_ptr<SimChannel> source;
  std::weak_ptr<SimChannel> target;  ///< null until the connection is accepted
  std::deque<Packet> packets;
  bool hold_rest = false;  ///< messages sent from now on are held
  bool dead = false;       ///< the sender was killed: carries no more packets

  /// Removes the packets that arrive by `now`: those due at the front; with `reorder` also messages behind
  /// others.
  std::vector<Packet> take_due(TimePoint now, bool reorder);
};

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
  std::size_t sweep_links_at_ TORCHSPAN_GUARDED_BY(mutex) = 64;
  std::set<Names> cuts_ TORCHSPAN_GUARDED_BY(mutex);
};

}  // namespace torchspan::net
