#pragma once
#include <memory>
#include <string>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/session.h>

namespace torchspan {

/// Decides from a worker's options how peers reach it and how it reaches them: shared memory if all workers
/// are on one host, else shared memory and TLS on the address that leads to the master. Outlives the
/// transports it makes.
class Endpoint {
 public:
  /// Finds the route to the master, which may query the name service. Throws Error{kInvalid} if there is no
  /// route.
  Endpoint(Runtime& runtime, const WorkerOptions& options, net::Secret secret, std::string host_mark);

  /// The address at which the worker's transport listens.
  const std::string& listen() const { return listen_; }
  /// The address that peers get when the transport listens at `bound`.
  std::string advertised_address(const std::string& bound) const;
  /// The address at which rank 0 serves the store; empty: where workers look for it.
  const std::string& store_listen() const { return store_listen_; }
  std::unique_ptr<net::Transport> make_transport(net::Handler& handler) const;
  rendezvous::TransportFactory store_transports() const;

 private:
  void choose_hosts(const rendezvous::WorkerEnvironment& environment);

  Runtime& runtime_;
  const net::Secret secret_;
  net::TransportOptions transport_;
  net::NetworkOptions network_;
  const std::string host_mark_;  ///< empty: this boot of this machine
  bool one_host_;
  bool store_over_tls_;
  std::string listen_;
  std::string store_listen_;
  std::string advertised_host_;  ///< sent to peers in place of "every interface"
};

}  // namespace torchspan
