#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <sys/un.h>

namespace torchspan::net {

/// "unix:/path", "tcp:127.0.0.1:port", "tcp:[::1]:port" or "tcp:localhost:port", read and checked.
struct Address {
  enum class Kind : std::uint8_t { kUnix, kTcp };
  Kind kind;
  std::string text;
  std::string path;         ///< of a Unix socket
  std::uint16_t port = 0;   ///< of a TCP socket
  sockaddr_storage socket;  ///< as the system wants it
  socklen_t socket_size;

  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&socket); }
};

/// Throws kInvalid for what is no such address (a path too long included) and kUnsupported for a TCP address
/// that leaves this host.
Address parse_address(const std::string& text);

/// A number from 0 to 65535, and nothing else.
std::optional<std::uint16_t> parse_port(std::string_view text);

/// The address of a TCP socket as it is written: "scheme:host:port".
std::string tcp_text(const sockaddr_storage& socket, std::string_view scheme = "tcp");

}  // namespace torchspan::net
