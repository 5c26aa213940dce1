#include "net/stream/address.h"

#include <arpa/inet.h>
#include <charconv>
#include <cstring>
#include <fmt/format.h>
#include <netinet/in.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

constexpr std::string_view kUnixPrefix = "unix:";
constexpr std::string_view kTcpPrefix = "tcp:";

[[noreturn]] void throw_unreadable(const std::string& text, std::string_view why) {
  throw Error(ErrorKind::kInvalid,
              fmt::format("'{}' is not an address of this transport: {}; write unix:/absolute/path or "
                          "tcp:127.0.0.1:port",
                          text, why));
}

Address parse_unix(const std::string& text) {
  Address address{.kind = Address::Kind::kUnix,
                  .text = text,
                  .path = text.substr(kUnixPrefix.size()),
                  .socket = {},
                  .socket_size = sizeof(sockaddr_un)};
  auto& socket = reinterpret_cast<sockaddr_un&>(address.socket);
  if (address.path.empty() || address.path.front() != '/') throw_unreadable(text, "the path is not absolute");
  if (address.path.back() == '/' || address.path.find('\0') != std::string::npos) {
    throw_unreadable(text, "the path does not name a file");
  }
  if (address.path.size() >= sizeof socket.sun_path) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("'{}' is {} bytes long, but the system takes at most {} for a Unix socket's path: use a "
                    "shorter directory, e.g. below $XDG_RUNTIME_DIR",
                    address.path, address.path.size(), sizeof socket.sun_path - 1));
  }
  socket.sun_family = AF_UNIX;
  std::memcpy(socket.sun_path, address.path.data(), address.path.size());
  return address;
}

/// Fills in the socket address of a loopback host; returns false for any other host.
bool fill_loopback(Address& address, std::string host) {
  if (host == "localhost") host = "127.0.0.1";
  auto& four = reinterpret_cast<sockaddr_in&>(address.socket);
  if (::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(address.port);
    address.socket_size = sizeof four;
    return (ntohl(four.sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  auto& six = reinterpret_cast<sockaddr_in6&>(address.socket);
  if (::inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(address.port);
    address.socket_size = sizeof six;
    return IN6_IS_ADDR_LOOPBACK(&six.sin6_addr);
  }
  return false;
}

Address parse_tcp(const std::string& text) {
  const std::string rest = text.substr(kTcpPrefix.size());
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos) throw_unreadable(text, "the port is missing");
  const auto port = parse_port(std::string_view(rest).substr(colon + 1));
  if (!port) throw_unreadable(text, "the port is not a number from 0 to 65535");
  std::string host = rest.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host.empty()) throw_unreadable(text, "the host is missing");
  Address address{
      .kind = Address::Kind::kTcp, .text = text, .path = {}, .port = *port, .socket = {}, .socket_size = 0};
  if (!fill_loopback(address, host)) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format(
            "'{}' is not a loopback address, and plain TCP would carry everything unencrypted: use the "
            "tls transport between hosts, or unix:/path and tcp:127.0.0.1:port on one host",
            text));
  }
  return address;
}

}  // namespace

Address parse_address(const std::string& text) {
  if (text.starts_with(kUnixPrefix)) return parse_unix(text);
  if (text.starts_with(kTcpPrefix)) return parse_tcp(text);
  throw_unreadable(text, "it begins with neither unix: nor tcp:");
}

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return port;
}

std::string tcp_text(const sockaddr_storage& socket, std::string_view scheme) {
  char host[INET6_ADDRSTRLEN] = "?";
  if (socket.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(socket);
    ::inet_ntop(AF_INET6, &six.sin6_addr, host, sizeof host);
    return fmt::format("{}:[{}]:{}", scheme, host, ntohs(six.sin6_port));
  }
  const auto& four = reinterpret_cast<const sockaddr_in&>(socket);
  ::inet_ntop(AF_INET, &four.sin_addr, host, sizeof host);
  return fmt::format("{}:{}:{}", scheme, host, ntohs(four.sin_port));
}

}  // namespace torchspan::net
