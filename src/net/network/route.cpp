#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/socket.h>

#include "core/api/descriptor.h"
#include "net/api/network.h"
#include "net/network/place.h"
#include "net/tls/tls_address.h"

namespace torchspan::net {
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
    throw Error(ErrorKind::kInvalid, error.message());
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
  throw Error(ErrorKind::kInvalid,
              fmt::format("there is no route from here to '{}': {}; is it the right host, "
                          "and is the network up?",
                          host, std::strerror(failure)));
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
