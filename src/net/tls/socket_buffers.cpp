#include "net/tls/socket_buffers.h"

#include <algorithm>
#include <fstream>
#include <sys/socket.h>

namespace torchspan::net {
namespace {

constexpr long kWideBuffer = 4 << 20;

/// The last number in a file of the system's settings; 0 if it cannot be read.
long last_number_in(const char* path) {
  std::ifstream file(path);
  long number = 0;
  for (long next; file >> next;) number = next;
  return number;
}

/// `most`: the file with the largest size that a program may set, which the kernel doubles; `adjusted`: the
/// file with the largest size that the kernel's adjustment reaches, which ends when a program sets a size.
int wide_size(const char* most, const char* adjusted) {
  const long size = std::min(kWideBuffer, last_number_in(most));
  return 2 * size > last_number_in(adjusted) ? static_cast<int>(size) : 0;
}

}  // namespace

SocketBuffers::SocketBuffers()
    : send_(wide_size("/proc/sys/net/core/wmem_max", "/proc/sys/net/ipv4/tcp_wmem")),
      receive_(wide_size("/proc/sys/net/core/rmem_max", "/proc/sys/net/ipv4/tcp_rmem")) {}

void SocketBuffers::widen(int socket) const {
  if (send_ != 0) ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &send_, sizeof send_);
  if (receive_ != 0) ::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &receive_, sizeof receive_);
}

}  // namespace torchspan::net
