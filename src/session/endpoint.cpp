#include "session/endpoint.h"

#include <fmt/format.h>
#include <random>

#include "device/api/device_runtime.h"
#include "net/api/local.h"
#include "net/api/network.h"
#include "rendezvous/api/environment.h"

namespace torchspan {
namespace {

/// Returns a socket path that cannot be guessed and that no two workers share. It is short, since socket
/// paths have at most 107 bytes.
std::string socket_in(const std::string& folder, int rank) {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
  return rank == rendezvous::kAnyRank ? fmt::format("unix:{}/any-{:016x}.sock", folder, number)
                                      : fmt::format("unix:{}/{}-{:016x}.sock", folder, rank, number);
}

std::string at(const char* scheme, const std::string& host, int port) {
  const bool bare = host.find(':') != std::string::npos && !host.starts_with('[');
  return bare ? fmt::format("{}:[{}]:{}", scheme, host, port) : fmt::format("{}:{}:{}", scheme, host, port);
}

}  // namespace

Endpoint::Endpoint(Runtime& runtime, const WorkerOptions& options, net::Secret secret, std::string host_mark)
    : runtime_(runtime),
      secret_(std::move(secret)),
      network_(options.network),
      host_mark_(std::move(host_mark)),
      one_host_(options.environment.one_host()),
      store_over_tls_(options.environment.store_address().starts_with("tls:")) {
  transport_.secret = secret_;
  transport_.max_unsent = options.max_unsent_bytes;
  if (options.device_staging_bytes != 0 && device::cuda_device_runtime())
    transport_.device_memory = net::DeviceMemoryKind::kCuda;
  network_.local.metrics = &runtime_.metrics;
  if (network_.ucx) network_.ucx->metrics = &runtime_.metrics;
  const rendezvous::WorkerEnvironment& environment = options.environment;
  listen_ = socket_in(rendezvous::make_runtime_folder(environment), environment.rank);
  if (!one_host_) choose_hosts(environment);
}

void Endpoint::choose_hosts(const rendezvous::WorkerEnvironment& environment) {
  const std::string& named = environment.listen_host;
  const std::string route = net::route_to(environment.master_host);
  const std::string host = named.empty() ? route : named;
  if (net::is_any_host(host)) advertised_host_ = route;
  listen_ += "," + at(network_.ucx ? "ucx" : "tls", host, 0);
  if (environment.rank != 0) return;
  if (!named.empty() && store_over_tls_) store_listen_ = at("tls", named, environment.master_port);
  if (net::is_loopback_host(route) && !net::is_loopback_host(environment.master_host)) {
    runtime_.log.warning(fmt::format(
        "MASTER_ADDR is '{}', which is {} on this host (see /etc/hosts), so workers of other hosts "
        "cannot reach this one; set MASTER_ADDR to an address that they can",
        environment.master_host, route));
  }
}

std::string Endpoint::advertised_address(const std::string& bound) const {
  return advertised_host_.empty() ? bound : net::with_far_host(bound, advertised_host_);
}

std::unique_ptr<net::Transport> Endpoint::make_transport(net::Handler& handler) const {
  return one_host_ ? net::make_local_transport(runtime_.executor, handler, transport_, network_.local)
                   : net::make_marked_network_transport(runtime_.executor, handler, transport_,
                                                        {network_, host_mark_});
}

rendezvous::TransportFactory Endpoint::store_transports() const {
  return store_over_tls_ ? rendezvous::tls_transports(runtime_.executor, secret_, network_.tls)
                         : rendezvous::stream_transports(runtime_.executor, secret_);
}

}  // namespace torchspan
