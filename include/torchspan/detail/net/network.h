#pragma once
#include <memory>
#include <optional>
#include <string>

#include <torchspan/detail/net/transport.h>
#include <torchspan/net/local.h>
#include <torchspan/net/tls.h>
#include <torchspan/net/ucx.h>

namespace torchspan::net {

struct NetworkOptions {
  LocalOptions local = {};
  TlsOptions tls = {};
  /// Between hosts UCX carries the messages and TLS proves who is there; the same on all workers. Its own
  /// `tls` is not looked at: the one above holds.
  std::optional<UcxOptions> ucx = {};
  /// What this host is called in addresses; empty: this boot of this machine. For tests that play several
  /// hosts on one.
  std::string host_mark = {};
};

/// The transport of a world of several hosts: shared memory to peers of this host, TLS (or UCX) to all
/// others. It listens at "unix:/path,tls:host:port" ("ucx:" with UCX) and tells peers
/// "unix:/path@mark,tls:host:port"; who has the same mark and finds the socket dials it, everybody else dials
/// by TLS. A mark and a path alone prove nothing: the dialled socket and the memory passed over it do. Either
/// half may stand alone. Throws as make_local_transport(), make_tls_transport() and make_ucx_transport().
std::unique_ptr<Transport> make_network_transport(Executor& executor, Handler& handler,
                                                  TransportOptions options, NetworkOptions network = {});

/// The address of this host from which `host`, a name or an address, would be reached: where a worker listens
/// so that its peers find it, without brackets. Asks the system's resolver and may take long; sends nothing.
/// Throws kInvalid for a name that is not known or a host to which no route leads.
std::string route_to(const std::string& host);

/// `address` of a network transport with `host` in place of its TLS or UCX host: what peers are told by a
/// worker that listens on every interface.
std::string with_far_host(const std::string& address, const std::string& host);

/// Whether `host` is the address of no interface in particular: 0.0.0.0 or ::.
bool is_any_host(const std::string& host);
/// Whether `host` is an address that does not leave this machine, or the name localhost.
bool is_loopback_host(const std::string& host);

}  // namespace torchspan::net
