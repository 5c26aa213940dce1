#pragma once
#include <memory>
#include <string>

#include <torchspan/detail/net/transport.h>
#include <torchspan/net.h>

namespace torchspan::net {

/// This host's address, without brackets, on the route to `host` (a name or an address), at which a worker
/// listens for its peers. Uses the system resolver, which may be slow; sends no traffic to `host`. Throws
/// kInvalid for an unknown name or an unreachable host.
std::string route_to(const std::string& host);

/// The host, without brackets, at which other hosts reach the worker of an address such as
/// "unix:/path@mark,tls:10.0.0.2:4711"; empty if none can.
std::string host_of_route(const std::string& address);

/// `address` with `host` in place of its TLS or UCX host: advertised by a worker that listens on every
/// interface.
std::string with_far_host(const std::string& address, const std::string& host);

/// Whether `host` is a wildcard address: 0.0.0.0 or ::.
bool is_any_host(const std::string& host);
/// Whether `host` is a loopback address or the name localhost.
bool is_loopback_host(const std::string& host);

struct MarkedNetworkOptions {
  NetworkOptions network = {};
  std::string host_mark =
      {};  ///< in this worker's addresses; empty: boot id of this machine; tests simulate several hosts
};

/// Transport for several hosts: shared memory to peers on this host, TLS (or UCX) to others. Listens at
/// "unix:/path,tls:host:port" ("ucx:" with UCX) and advertises "unix:/path@boot-id,tls:host:port". A peer with
/// the same boot id that finds the socket dials it; others dial TLS. Boot id and path are only hints: the dialed
/// socket and the memory passed over it prove that peers share a host. Either part of an address may be
/// absent. Throws as make_local_transport(), make_tls_transport() and make_ucx_transport().
std::unique_ptr<Transport> make_marked_network_transport(Executor& executor, Handler& handler,
                                                         TransportOptions options,
                                                         MarkedNetworkOptions marked);

}  // namespace torchspan::net
