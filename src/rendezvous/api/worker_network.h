#pragma once
#include <memory>
#include <string>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/net.h>
#include <torchspan/rendezvous.h>

namespace torchspan::rendezvous {

struct WorkerNetworkOptions {
  WorkerEnvironment environment = {};
  net::NetworkOptions network = {};
  net::TransportOptions transport = {};  ///< of messages between workers; its secret is the job's
  std::string host_mark = {};            ///< empty: this boot of this machine
};

/// Decides how peers reach a worker and how it reaches them: shared memory if all workers are on one host, else
/// shared memory and TLS on the address that leads to the master.
class WorkerNetwork {
 public:
  /// Finds the route to the master, which may query the name service. Throws Error{kInvalid} if there is no
  /// route.
  WorkerNetwork(Runtime& runtime, WorkerNetworkOptions options);

  /// The address at which the worker's transport listens.
  const std::string& listen() const { return listen_; }
  /// The address that peers get when the transport listens at `bound`.
  std::string advertised_address(const std::string& bound) const;
  /// The address at which rank 0 serves the store; empty: where workers look for it.
  const std::string& store_listen() const { return store_listen_; }
  std::unique_ptr<net::Transport> make_transport(net::Handler& handler) const;
  TransportFactory store_transports() const;

 private:
  void choose_hosts();

  Runtime& runtime_;
  WorkerNetworkOptions options_;
  bool one_host_;
  bool store_over_tls_;
  std::string listen_;
  std::string store_listen_;
  std::string advertised_host_;  ///< sent to peers in place of "every interface"
};

}  // namespace torchspan::rendezvous
