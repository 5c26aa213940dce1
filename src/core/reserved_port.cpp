#include "core/api/reserved_port.h"

#include <cerrno>
#include <cstddef>
#include <netinet/in.h>
#include <random>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <utility>

namespace torchspan {

std::optional<ReservedPort> ReservedPort::take(std::uint16_t port) {
  Descriptor holder(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A name that begins with a zero byte is no file: the system removes it with the socket.
  const std::string name = "torchspan.port." + std::to_string(port);
  name.copy(static_cast<char*>(address.sun_path) + 1, name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  // If this system allows no such socket, the port is chosen without a reservation.
  if (bind(holder.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 && errno == EADDRINUSE)
    return std::nullopt;
  return ReservedPort(port, std::move(holder));
}

bool ReservedPort::is_free(std::uint16_t port, std::uint32_t address) {
  const Descriptor probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in wanted{};
  wanted.sin_family = AF_INET;
  wanted.sin_addr.s_addr = htonl(address);
  wanted.sin_port = htons(port);
  return bind(probe.get(), reinterpret_cast<const sockaddr*>(&wanted), sizeof wanted) == 0;
}

std::optional<ReservedPort> ReservedPort::draw(std::uint16_t first, std::uint16_t last,
                                               std::uint32_t address) {
  constexpr int kAttempts = 200;
  std::random_device random;
  std::uniform_int_distribution<int> number(first, last);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto port = static_cast<std::uint16_t>(number(random));
    auto reserved = take(port);
    if (reserved && is_free(port, address)) return reserved;
  }
  return std::nullopt;
}

}  // namespace torchspan
