#include "net/network/network_transport.h"

#include <sys/stat.h>

#include "net/api/network.h"
#include "net/local/local_transport.h"
#include "net/tls/tls_transport.h"
#include "net/ucx/ucx_part.h"

namespace torchspan::net {
namespace {

bool is_socket(const std::string& near) {
  struct stat about {};
  const std::string path = near.substr(near.find(':') + 1);
  return ::stat(path.c_str(), &about) == 0 && S_ISSOCK(about.st_mode);
}

}  // namespace

NetworkTransport::NetworkTransport(Executor& executor, std::unique_ptr<PolledTransport> near,
                                   std::unique_ptr<PolledTransport> far, std::string mark)
    : mark_(std::move(mark)),
      poller_(executor.make_poller()),
      parts_{std::move(near), std::move(far)},
      near_(*parts_[0]),
      far_(*parts_[1]) {
  for (std::size_t i = 0; i < parts_.size(); ++i) poller_->add(parts_[i]->descriptor(), i, false);
}

std::string NetworkTransport::listen(const std::string& address) {
  NetworkPlace place = parse_network_place(address);
  if (!place.far.empty()) place.far = far_.listen(place.far);
  if (!place.near.empty()) place.near = near_.listen(place.near);
  place.mark = place.near.empty() ? "" : mark_;
  return place.text();
}

bool NetworkTransport::can_reach(const std::string& address) const {
  try {
    const NetworkPlace place = parse_network_place(address);
    return place.far.empty() ? near_.can_reach(place.near) : far_.can_reach(place.far);
  } catch (const Error&) {
    return false;
  }
}

bool NetworkTransport::is_here(const NetworkPlace& place) const {
  return !place.near.empty() && place.mark == mark_ && !mark_.empty() && is_socket(place.near);
}

std::shared_ptr<Channel> NetworkTransport::connect(const std::string& address, Deadline deadline) {
  const NetworkPlace place = parse_network_place(address);
  const bool near = place.far.empty() || is_here(place);
  return near ? near_.connect(place.near, deadline) : far_.connect(place.far, deadline);
}

bool NetworkTransport::poll() {
  const bool near = near_.poll();
  return far_.poll() || near;
}

void NetworkTransport::wait(Deadline deadline) {
  bool may_sleep = !woken_.exchange(false, std::memory_order_acquire);
  for (const auto& part : parts_) may_sleep &= part->prepare_sleep(deadline);
  std::array<Poller::Event, 2> events;
  std::array<bool, 2> ready{};
  if (may_sleep) {
    const std::size_t count = poller_->wait(events, deadline);
    for (std::size_t i = 0; i < count; ++i) ready[events[i].token] = true;
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) parts_[i]->end_sleep(ready[i]);
  woken_.store(false, std::memory_order_relaxed);
}

void NetworkTransport::wake() {
  woken_.store(true, std::memory_order_release);
  poller_->wake();
}

std::unique_ptr<Transport> make_network_transport(Executor& executor, Handler& handler,
                                                  TransportOptions options, NetworkOptions network) {
  return make_marked_network_transport(executor, handler, std::move(options),
                                       {.network = std::move(network)});
}

std::unique_ptr<Transport> make_marked_network_transport(Executor& executor, Handler& handler,
                                                         TransportOptions options,
                                                         MarkedNetworkOptions marked) {
  NetworkOptions& network = marked.network;
  auto near = make_local_part(executor, handler, options, {.options = std::move(network.local)});
  std::unique_ptr<PolledTransport> far;
  if (network.ucx) {
    network.ucx->tls = std::move(network.tls);
    far = make_ucx_part(executor, handler, std::move(options), *std::move(network.ucx));
  } else {
    far = std::make_unique<TlsTransport>(executor, handler, std::move(options), std::move(network.tls));
  }
  std::string mark = marked.host_mark.empty() ? boot_mark() : std::move(marked.host_mark);
  return std::make_unique<NetworkTransport>(executor, std::move(near), std::move(far), std::move(mark));
}

}  // namespace torchspan::net
