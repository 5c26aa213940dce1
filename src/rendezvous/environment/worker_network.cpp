#include "rendezvous/api/worker_network.h"

#include <fmt/format.h>
#include <random>
#include <utility>

#include "net/api/local.h"
#include "net/api/network.h"
#include "rendezvous/api/environment.h"

namespace torchspan::rendezvous {
namespace {

/// Returns a socket path that cannot be guessed and that no two workers share. It is short, since socket
/// paths have at most 107 bytes.
std::string socket_in(const std::string& folder, int rank) {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
  return rank == kAnyRank ? fmt::format("unix:{}/any-{:016x}.sock", folder, number)
                          : fmt::format("unix:{}/{}-{:016x}.sock", folder, rank, number);
}

std::string at(const char* scheme, const std::string& host, int port) {
  const bool bare = host.find(':') != std::string::npos && !host.starts_with('[');
  return bare ? fmt::format("{}:[{}]:{}", scheme, host, port) : fmt::format("{}:{}:{}", scheme, host, port);
}

}  // namespace

WorkerNetwork::WorkerNetwork(Runtime& runtime, WorkerNetworkOptions options)
    : runtime_(runtime),
      options_(std::move(options)),
      one_host_(options_.environment.one_host()),
      store_over_tls_(options_.environment.store_address().starts_with("tls:")) {
  options_.network.local.metrics = &runtime_.metrics;
  if (options_.network.ucx) options_.network.ucx->metrics = &runtime_.metrics;
  listen_ = socket_in(make_runtime_folder(options_.environment), options_.environment.rank);
  if (!one_host_) choose_hosts();
}

void WorkerNetwork::choose_hosts() {
  const WorkerEnvironment& environment = options_.environment;
  const std::string& named = environment.listen_host;
  const std::string route = net::route_to(environment.master_host);
  const std::string host = named.empty() ? route : named;
  if (net::is_any_host(host)) advertised_host_ = route;
  listen_ += "," + at(options_.network.ucx ? "ucx" : "tls", host, 0);
  if (environment.rank != 0) return;
  if (!named.empty() && store_over_tls_) store_listen_ = at("tls", named, environment.master_port);
  if (net::is_loopback_host(route) && !net::is_loopback_host(environment.master_host)) {
    runtime_.log.warning(fmt::format(
        "MASTER_ADDR is '{}', which is {} on this host (see /etc/hosts), so workers of other hosts "
        "cannot reach this one; set MASTER_ADDR to an address that they can",
        environment.master_host, route));
  }
}

std::string WorkerNetwork::advertised_address(const std::string& bound) const {
  return advertised_host_.empty() ? bound : net::with_far_host(bound, advertised_host_);
}

std::unique_ptr<net::Transport> WorkerNetwork::make_transport(net::Handler& handler) const {
  return one_host_ ? net::make_local_transport(runtime_.executor, handler, options_.transport,
                                               options_.network.local)
                   : net::make_marked_network_transport(runtime_.executor, handler, options_.transport,
                                                        {options_.network, options_.host_mark});
}

TransportFactory WorkerNetwork::store_transports() const {
  return store_over_tls_ ? tls_transports(runtime_.executor, options_.transport.secret, options_.network.tls)
                         : stream_transports(runtime_.executor, options_.transport.secret);
}

}  // namespace torchspan::rendezvous
