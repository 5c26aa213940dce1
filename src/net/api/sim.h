#pragma once
#include <functional>
#include <memory>
#include <string>

#include <torchspan/detail/net/transport.h>

#include "core/api/sim_executor.h"

namespace torchspan::net {

/// What one simulated message is, for predicates of the levers. `header` is the sender's header bytes.
struct SimMessage {
  std::string from;  ///< address of the sender's transport ("sim:worker0")
  std::string to;
  std::uint64_t number;  ///< 0, 1, 2 … in order of sending on this network
  BytesView header;
};
using SimPredicate = std::function<bool(const SimMessage&)>;

/// A network inside the process, on a SimExecutor's clock and seed. Without levers it delivers in order after
/// `latency`. FaultInjection may be pulled at any time by simulated threads; faults drawn by chance come from
/// the seed. Drops, reordering and duplication break the Channel's promise on purpose: only protocols that
/// expect them use them. Handshakes and goodbyes are subject to latency, cut() and kill(), not to the other
/// levers.
class SimNetwork {
 public:
  struct Options {
    Duration latency = std::chrono::microseconds(20);
    Duration jitter{0};    ///< uniform extra delay; order per channel is kept unless `reorder`
    bool reorder = false;  ///< jitter may overtake
    double drop = 0;       ///< chance that a message vanishes
    double duplicate = 0;  ///< chance that it arrives twice
  };
  struct Counters {
    std::uint64_t sent = 0, delivered = 0, dropped = 0, duplicated = 0;
  };
  SimNetwork(SimExecutor& executor, Options options);
  ~SimNetwork();

  /// A transport on this network; it listens at "sim:<name>".
  std::unique_ptr<Transport> make_transport(const std::string& name, Handler& handler,
                                            TransportOptions options);

  void set_options(Options options);
  /// Messages for which `match` is true wait until unblock(), and so does what follows them on their channel,
  /// unless Options::reorder lets it overtake.
  void block(SimPredicate match);
  /// Lets the first matching message through and holds everything its sender sends on that channel after it.
  void block_after(SimPredicate match);
  void unblock();
  /// Messages for which `match` is true vanish; an empty predicate ends it.
  void drop_if(SimPredicate match);
  /// Messages for which `match` is true take longer, and so does what follows them on their channel unless
  /// Options::reorder; an empty predicate ends it.
  void delay_if(SimPredicate match, Duration extra);
  /// The peer at `name` dies at once: its transport stops, every channel to it closes with kDisconnected, and
  /// what it had under way vanishes. The dead transport's own channels close too, so that its threads can
  /// end.
  void kill(const std::string& name);
  /// Every connection between two names breaks, as a router that restarts breaks them: what was under way is
  /// lost, both sides hear kDisconnected, and either may dial again.
  void sever(const std::string& a, const std::string& b);
  /// Cuts or heals the link between two names: cut links deliver nothing and report nothing. What was sent
  /// meanwhile arrives after heal(), as TCP would have it.
  void cut(const std::string& a, const std::string& b);
  void heal(const std::string& a, const std::string& b);

  Counters counters() const;
  /// Called for every message sent; for tests that want to print or count.
  void observe(std::function<void(const SimMessage&)> observer);

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::net
