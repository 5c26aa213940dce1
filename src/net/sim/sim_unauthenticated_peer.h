#pragma once
#include <memory>
#include <string>

#include "net/api/sim.h"
#include "net/sim/sim_network.h"
#include "net/sim/sim_transport.h"

namespace torchspan::net {

/// For tests: a peer without a transport that dials a simulated worker and sends arbitrary bytes.
class SimUnauthenticatedPeer {
 public:
  SimUnauthenticatedPeer(const SimNetwork& network, const std::string& name);
  ~SimUnauthenticatedPeer();

  /// Dials `address` with `bytes` instead of a greeting.
  void dial(const std::string& address, BytesView bytes);
  /// Sends more bytes where a handshake is expected.
  void send(BytesView bytes);
  /// Whether the worker ended the connection.
  bool hung_up() const;

 private:
  const std::shared_ptr<SimNetwork::Impl> network_;
  const std::shared_ptr<SimNode> node_;
  std::shared_ptr<SimChannel> channel_;
};

}  // namespace torchspan::net
