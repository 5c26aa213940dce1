#include "net/tls/byte_stream.h"

#include <cerrno>
#include <sys/socket.h>

namespace torchspan::net {
namespace {

msghdr to_message(std::span<const iovec> places) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(places.data());
  message.msg_iovlen = places.size();
  return message;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

ssize_t send_now(int socket, std::span<const iovec> places) {
  const msghdr message = to_message(places);
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 && (would_block(errno) || errno == ENOBUFS) ? 0 : sent;
}

ByteStream::Got receive_now(int socket, std::span<const iovec> places) {
  msghdr message = to_message(places);
  ssize_t size;
  do {
    size = ::recvmsg(socket, &message, MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  ByteStream::Got got;
  got.ended = size == 0;
  if (size < 0 && !would_block(errno)) got.broken = errno;
  if (size > 0) got.size = static_cast<std::size_t>(size);
  got.heard = got.size != 0;
  return got;
}

}  // namespace torchspan::net
