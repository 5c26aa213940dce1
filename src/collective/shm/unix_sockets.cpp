#include "collective/shm/unix_sockets.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace torchspan::collective::shm {
namespace {

struct Place {
  sockaddr_un address{};
  socklen_t size = 0;
};

/// A leading zero keeps the name out of the file system.
Place place_of(const std::string& name) {
  Place place;
  place.address.sun_family = AF_UNIX;
  const std::size_t begin = UnixListener::is_nameless(name) ? 1 : 0;
  const std::size_t size = std::min(name.size(), sizeof place.address.sun_path - 1);
  std::memcpy(place.address.sun_path + begin, name.data(), size);
  place.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  return place;
}

Descriptor make_socket() {
  Descriptor socket = Descriptor::not_inherited(
      [] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!socket) {
    throw_if_no_descriptor_is_left("a socket of a group");
    throw Error(ErrorKind::kUnsupported,
                fmt::format("cannot create a Unix socket: {}", std::strerror(errno)));
  }
  return socket;
}

bool is_of_this_user(const Descriptor& socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

Error disconnected(const char* what) {
  return {ErrorKind::kDisconnected, fmt::format("{} while the group was being made: {}", what,
                                                errno == 0 ? "the other end closed" : std::strerror(errno))};
}

std::unique_ptr<Poller> make_poller(Executor& executor) {
  try {
    return executor.make_poller();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kOverloaded) throw NoDescriptorLeft(error.kind(), error.message());
    throw;
  }
}

void wait_for(Executor& executor, const std::vector<int>& sockets, bool writable, Deadline deadline) {
  const auto poller = make_poller(executor);
  for (std::size_t i = 0; i < sockets.size(); ++i) poller->add(sockets[i], i, writable);
  std::array<Poller::Event, 1> events;
  if (poller->wait(events, deadline) == 0 && deadline.passed(executor.now())) {
    throw Error(ErrorKind::kTimedOut,
                "the members of the group did not connect to each other before the deadline");
  }
}

}  // namespace

void throw_if_no_descriptor_is_left(const char* what) {
  const int reason = errno;
  if (reason != EMFILE && reason != ENFILE) return;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  throw NoDescriptorLeft(
      ErrorKind::kOverloaded,
      reason == EMFILE
          ? fmt::format("no file descriptor is left for {}: this process may have {}; raise the limit "
                        "(ulimit -n), or release groups and connections",
                        what, limit.rlim_cur)
          : fmt::format("no file descriptor is left for {} on this system: raise fs.file-max", what));
}

void UnixConnection::wait_until_ready(bool writable, Deadline deadline) {
  wait_for(*executor_, {socket_.get()}, writable, deadline);
}

void UnixConnection::send(BytesView bytes, int descriptor, Deadline deadline) {
  while (send_with_descriptor(socket_.get(), bytes, descriptor, 0) < 0) {
    if (!would_block()) throw disconnected("a message could not be sent");
    wait_until_ready(true, deadline);
  }
}

DescriptorMessage UnixConnection::receive(std::size_t most, Deadline deadline) {
  DescriptorMessage message{.bytes = Bytes(most)};
  ReceivedBytes received;
  while ((received = receive_with_descriptors(socket_.get(), message.bytes, 0)).size < 0) {
    if (!would_block()) throw disconnected("a message could not be received");
    wait_until_ready(false, deadline);
  }
  if (received.descriptors.size() == 1) message.descriptor = std::move(received.descriptors.front());
  errno = received.truncated && received.descriptors.empty() ? EMFILE : 0;
  throw_if_no_descriptor_is_left("the memory of a member of the group");
  if (received.size == 0) throw disconnected("a member disconnected");
  message.bytes.resize(static_cast<std::size_t>(received.size));
  return message;
}

UnixListener::UnixListener(Executor& executor, const std::vector<std::string>& names) : executor_(executor) {
  for (const std::string& name : names) {
    Descriptor socket = make_socket();
    const Place place = place_of(name);
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&place.address), place.size) == 0) {
      listeners_.emplace_back(name, std::move(socket));
      if (::listen(listeners_.back().socket.get(), SOMAXCONN) == 0) continue;
      listeners_.pop_back();
    }
    if (!is_nameless(name)) continue;
    throw Error(ErrorKind::kUnsupported,
                fmt::format("cannot listen on a Unix socket: {}", std::strerror(errno)));
  }
}

UnixListener::Listener::~Listener() {
  if (!name.empty() && !is_nameless(name)) ::unlink(name.c_str());
}

std::vector<std::string> UnixListener::names() const {
  std::vector<std::string> names;
  for (const Listener& listener : listeners_) names.push_back(listener.name);
  return names;
}

std::optional<UnixConnection> UnixListener::accept_at(const Listener& listener) {
  Descriptor socket = Descriptor::not_inherited(
      [&] { return ::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
  if (socket && is_of_this_user(socket)) return UnixConnection(executor_, std::move(socket));
  if (!socket && !would_block() && errno != ECONNABORTED) {
    throw_if_no_descriptor_is_left("the connection of a member of the group");
    throw Error(ErrorKind::kOverloaded,
                fmt::format("cannot accept a member of the group: {}", std::strerror(errno)));
  }
  return std::nullopt;
}

UnixConnection UnixListener::accept(Deadline deadline) {
  std::vector<int> sockets;
  for (const Listener& listener : listeners_) sockets.push_back(listener.socket.get());
  while (true) {
    for (const Listener& listener : listeners_) {
      if (auto connection = accept_at(listener)) return std::move(*connection);
    }
    wait_for(executor_, sockets, false, deadline);
  }
}

UnixConnection dial(Executor& executor, const std::string& name) {
  Descriptor socket = make_socket();
  const Place place = place_of(name);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&place.address), place.size) != 0) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("its Unix socket cannot be reached ({}): the processes have different network "
                            "namespaces, as in containers and pods, and no common folder",
                            std::strerror(errno)));
  }
  if (!is_of_this_user(socket)) throw Error(ErrorKind::kDenied, "it runs as another user");
  return {executor, std::move(socket)};
}

Bytes random_bytes(std::size_t size) {
  Bytes bytes(size);
  std::size_t at = 0;
  while (at < size) {
    const ssize_t got = ::getrandom(bytes.data() + at, size - at, 0);
    if (got < 0 && errno != EINTR) {
      throw Error(ErrorKind::kUnsupported,
                  fmt::format("the system's random source failed: {}", std::strerror(errno)));
    }
    if (got > 0) at += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace torchspan::collective::shm
