#include "net/tls/byte_stream.h"

#include <cerrno>
#include <sys/socket.h>

namespace torchspan::net {

ByteStream::Got receive_now(int socket, std::span<const iovec> places) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(places.data());
  message.msg_iovlen = places.size();
  ssize_t size;
  do {
    size = ::recvmsg(socket, &message, MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  ByteStream::Got got;
  got.ended = size == 0;
  if (size < 0 && errno != EAGAIN && errno != EWOULDBLOCK) got.broken = errno;
  if (size > 0) got.size = static_cast<std::size_t>(size);
  got.heard = got.size != 0;
  return got;
}

}  // namespace torchspan::net
