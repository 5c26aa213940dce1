#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <sys/un.h>

namespace torchspan::net {

/// A parsed address: "unix:/path", "tcp:127.0.0.1:port", "tcp:[::1]:port" or "tcp:localhost:port".
struct Address {
  enum class Kind : std::uint8_t { kUnix, kTcp };
  Kind kind;
  std::string text;
  std::string path;         ///< of a Unix socket
  std::uint16_t port = 0;   ///< of a TCP socket
  sockaddr_storage socket;  ///< in the system's form
  socklen_t socket_size;

  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&socket); }
};

/// Throws kInvalid for any other text and for a path that is too long, kUnsupported for a TCP address outside
/// this host.
Address parse_address(const std::string& text);

/// Parses a number from 0 to 65535; nullopt for any other text.
std::optional<std::uint16_t> parse_port(std::string_view text);

/// Formats the address of a TCP socket: "scheme:host:port".
std::string tcp_text(const sockaddr_storage& socket, std::string_view scheme = "tcp");

}  // namespace torchspan::net
