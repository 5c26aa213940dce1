#include "collective/c10d/connections.h"

#include <charconv>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <netinet/in.h>
#include <sys/socket.h>

#include "core/api/descriptor.h"

namespace torchspan::collective {
namespace {

/// Family, port and address; empty for other families.
std::string key_of(const sockaddr_storage& address) {
  const auto text = [](const void* data, std::size_t size) {
    return std::string(static_cast<const char*>(data), size);
  };
  if (address.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(address);
    return text(&four.sin_port, sizeof four.sin_port) + text(&four.sin_addr, sizeof four.sin_addr);
  }
  if (address.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
    return text(&six.sin6_port, sizeof six.sin6_port) + text(&six.sin6_addr, sizeof six.sin6_addr);
  }
  return {};
}

}  // namespace

void Connections::find(const std::vector<std::uint8_t>& told, std::set<std::string>& addresses) {
  for (const std::size_t size : {sizeof(sockaddr_in), sizeof(sockaddr_in6)}) {
    for (std::size_t at = 0; at + size <= told.size(); ++at) {
      sockaddr_storage address{};
      std::memcpy(&address, told.data() + at, size);
      if (address.ss_family != (size == sizeof(sockaddr_in) ? AF_INET : AF_INET6)) continue;
      addresses.insert(key_of(address));
    }
  }
}

bool Connections::is_ours(int socket) const {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) {
    return false;
  }
  return own_.contains(key_of(own)) || peers_.contains(key_of(peer));
}

int Connections::end() const {
  std::vector<int> descriptors;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const std::string name = entry.path().filename().string();
    int descriptor = -1;
    if (std::from_chars(name.data(), name.data() + name.size(), descriptor).ec == std::errc()) {
      descriptors.push_back(descriptor);
    }
  }
  int ended = 0;
  for (const int descriptor : descriptors) {
    // Another thread may reuse the number at any time, but not the copy's.
    const Descriptor copy(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (copy && is_ours(copy.get()) && ::shutdown(copy.get(), SHUT_RDWR) == 0) ++ended;
  }
  return ended;
}

}  // namespace torchspan::collective
