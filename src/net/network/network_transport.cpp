#include "net/network/network_transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <string_view>
#include <sys/socket.h>
#include <sys/stat.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"
#include "core/api/system_files.h"
#include "core/api/throw_invalid.h"
#include "net/api/network.h"
#include "net/local/local_transport.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_transport.h"
#include "net/ucx/ucx_part.h"

namespace torchspan::net {
namespace {

constexpr std::string_view kNear = "unix:";
constexpr std::string_view kFar[] = {"tls:", "ucx:"};

}  // namespace

std::string NetworkPlace::text() const {
  std::string text = near;
  if (!mark.empty()) text += "@" + mark;
  if (!far.empty()) text += (text.empty() ? "" : ",") + far;
  return text;
}

NetworkPlace parse_network_place(const std::string& text) {
  NetworkPlace place;
  for (const std::string_view far : kFar) {
    if (text.starts_with(far)) {
      place.far = text;
      return place;
    }
  }
  if (!text.starts_with(kNear)) {
    throw_invalid(
        "'{}' is not an address of this transport: write unix:/path,tls:host:port (or ucx:), or one of the "
        "two",
        text);
  }
  std::size_t comma = std::string::npos;
  for (const std::string_view far : kFar) {
    const std::size_t found = text.rfind("," + std::string(far));
    if (found != std::string::npos && (comma == std::string::npos || found > comma)) comma = found;
  }
  place.near = text.substr(0, comma);
  if (comma != std::string::npos) place.far = text.substr(comma + 1);
  const std::size_t at = place.near.rfind('@');
  if (at != std::string::npos && place.near.find('/', at) == std::string::npos) {
    place.mark = place.near.substr(at + 1);
    place.near.resize(at);
  }
  return place;
}

std::string boot_mark() {
  std::string id = boot_id();
  std::erase(id, '-');
  return id;
}

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

namespace {

/// Any port works: connecting a datagram socket sends nothing.
constexpr int kSomePort = 9;

std::string in_address(const std::string& host) {
  return host.find(':') == std::string::npos ? host : "[" + host + "]";
}

/// The host of "scheme:host:port", without brackets.
std::string host_of(const std::string& text) {
  const std::size_t first = text.find(':') + 1;
  std::string host = text.substr(first, text.rfind(':') - first);
  if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
  return host;
}

}  // namespace

std::string route_to(const std::string& host) {
  TlsPlace place = parse_tls_address(fmt::format("tls:{}:{}", in_address(host), kSomePort));
  place.text = host;  // errors name the host only, because the port is arbitrary
  std::vector<Address> addresses;
  try {
    addresses = look_up(place);
  } catch (const Error& error) {
    throw_invalid(error.message());
  }
  int failure = 0;
  for (const Address& address : addresses) {
    const Descriptor socket(::socket(address.socket.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    if (socket && ::connect(socket.get(), address.raw(), address.socket_size) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0) {
      return host_of(tcp_text(own));
    }
    failure = errno;
  }
  throw_invalid("there is no route from here to '{}': {}; is it the right host, and is the network up?", host,
                std::strerror(failure));
}

std::string host_of_route(const std::string& address) {
  try {
    const std::string far = parse_network_place(address).far;
    return far.empty() ? far : host_of(far);
  } catch (const Error&) {
    return {};
  }
}

std::string with_far_host(const std::string& address, const std::string& host) {
  NetworkPlace place = parse_network_place(address);
  if (place.far.empty()) return address;
  place.far = fmt::format("{}{}{}", place.far.substr(0, place.far.find(':') + 1), in_address(host),
                          place.far.substr(place.far.rfind(':')));
  return place.text();
}

bool is_any_host(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

bool is_loopback_host(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

}  // namespace torchspan::net
