#pragma once
#include <string>

#include <torchspan/detail/net/network.h>

namespace torchspan::net {

struct MarkedNetworkOptions {
  NetworkOptions network = {};
  std::string host_mark = {};  ///< in this worker's addresses; empty: boot id of this machine
};

/// Like make_network_transport(), with the given host mark: tests simulate several hosts on one machine.
std::unique_ptr<Transport> make_marked_network_transport(Executor& executor, Handler& handler,
                                                         TransportOptions options,
                                                         MarkedNetworkOptions marked);

}  // namespace torchspan::net
