#include "launch/watch/local_request.h"

#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

namespace torchspan::launch {

LocalRequest::LocalRequest(const std::string& socket_path, const std::string& path)
    : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socket_path.copy(static_cast<char*>(address.sun_path), sizeof address.sun_path - 1);
  const std::string request = fmt::format("GET {} HTTP/1.0\r\n\r\n", path);
  over_ = !socket_ ||
          connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
          send(socket_.get(), request.data(), request.size(), MSG_NOSIGNAL) != std::ssize(request);
  ucred peer{};
  socklen_t size = sizeof peer;
  if (socket_ && getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) process_ = peer.pid;
}

void LocalRequest::read() {
  constexpr std::size_t kLongest = std::size_t{64} << 20;
  std::array<char, 65536> place;
  for (;;) {
    const ssize_t size = recv(socket_.get(), place.data(), place.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0 || answer_.size() > kLongest) {
      over_ = true;
      return;
    }
    answer_.append(place.data(), static_cast<std::size_t>(size));
  }
}

std::string_view LocalRequest::body() const {
  const auto head_end = answer_.find("\r\n\r\n");
  if (!over_ || head_end == std::string::npos) return {};
  return std::string_view(answer_).substr(head_end + 4);
}

}  // namespace torchspan::launch
