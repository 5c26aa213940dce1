#pragma once
#include <functional>
#include <memory>
#include <string>

#include <torchspan/detail/net/transport.h>

#include "core/api/sim_executor.h"

namespace torchspan::net {

/// One simulated message, for predicates of injected faults. `header` is the sender's header bytes.
struct SimMessage {
  std::string from;  ///< address of the sender's transport ("sim:worker0")
  std::string to;
  std::uint64_t number;  ///< 0, 1, 2 … in order of sending on this network
  BytesView header;
  std::size_t size = 0;  ///< bytes of header and segments
};
using SimPredicate = std::function<bool(const SimMessage&)>;

/// A network inside the process, on a SimExecutor's clock and seed. Without faults it delivers in order after
/// `latency`. Simulated threads may inject faults at any time; random faults come from the seed. Drops,
/// reordering and duplication break the contract of Channel: use them only for protocols that expect them.
/// Handshakes and goodbyes are subject to latency, cut() and kill() only.
class SimNetwork {
 public:
  struct Options {
    Duration latency = std::chrono::microseconds(20);
    Duration jitter{0};    ///< uniform extra delay; order per channel is kept unless `reorder`
    bool reorder = false;  ///< jitter may overtake
    double drop = 0;       ///< probability that a message is lost
    double duplicate = 0;  ///< probability that it arrives twice
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
  /// Holds messages for which `match` returns true until unblock(), and later messages on their channel, too,
  /// unless Options::reorder lets those overtake.
  void block(SimPredicate match);
  /// Delivers the first matching message and holds all that its sender sends on that channel after it.
  void block_after(SimPredicate match);
  void unblock();
  /// Drops messages for which `match` returns true; an empty predicate ends it.
  void drop_if(SimPredicate match);
  /// Delays messages for which `match` returns true by `extra`, and later messages on their channel, too,
  /// unless Options::reorder is set; an empty predicate ends it.
  void delay_if(SimPredicate match, Duration extra);
  /// The peer at `name` dies at once: its transport stops, every channel to it closes with kDisconnected, and
  /// its undelivered packets are lost. The dead transport's own channels close, too, so that its threads can
  /// end.
  void kill(const std::string& name);
  /// Breaks every connection between two names, like a router that restarts: undelivered packets are lost,
  /// the channels of both sides close with kDisconnected, and both may dial again.
  void sever(const std::string& a, const std::string& b);
  /// Cuts or heals the link between two names: a cut link delivers and reports nothing. Packets sent
  /// meanwhile arrive after heal(), as over TCP.
  void cut(const std::string& a, const std::string& b);
  void heal(const std::string& a, const std::string& b);

  Counters counters() const;
  /// Calls `observer` for every message sent, for tests that print or count.
  void observe(std::function<void(const SimMessage&)> observer);

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::net
