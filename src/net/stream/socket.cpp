#include "net/stream/socket.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string_view>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"

namespace torchspan::net {
namespace {

constexpr std::string_view kUnixPrefix = "unix:";
constexpr std::string_view kTcpPrefix = "tcp:";

[[noreturn]] void throw_unreadable(const std::string& text, std::string_view why) {
  throw_invalid(
      "'{}' is not an address of this transport: {}; write unix:/absolute/path or tcp:127.0.0.1:port", text,
      why);
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
    throw_invalid(
        "'{}' is {} bytes long, but the system takes at most {} for a Unix socket's path: use a shorter "
        "directory, e.g. below $XDG_RUNTIME_DIR",
        address.path, address.path.size(), sizeof socket.sun_path - 1);
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
  const auto port = parse_number<std::uint16_t>(std::string_view(rest).substr(colon + 1));
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

ssize_t send_now(int socket, std::span<const iovec> places) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(places.data());
  message.msg_iovlen = places.size();
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) ? 0 : sent;
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

namespace {

constexpr int kBacklog = 4096;
/// Descriptors that accepted connections cannot use: peers need some for a moment when they pass memory.
constexpr rlim_t kSpareDescriptors = 32;

int family_of(const Address& address) { return address.socket.ss_family; }

Descriptor make_socket(const Address& address) {
  Descriptor socket = Descriptor::not_inherited(
      [&] { return ::socket(family_of(address), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (socket) return socket;
  const int reason = errno;
  const bool exhausted = reason == EMFILE || reason == ENFILE;
  throw Error(exhausted ? ErrorKind::kOverloaded : ErrorKind::kUnsupported,
              fmt::format("no socket for '{}': {}{}", address.text, std::strerror(reason),
                          exhausted ? "; raise the limit of open files (ulimit -n)" : ""));
}

[[noreturn]] void throw_dial(const Address& address, int reason) {
  switch (reason) {
    case ENOENT:
    case ECONNREFUSED:
      throw Error(ErrorKind::kDisconnected,
                  fmt::format("no worker listens at '{}'; is it running yet?", address.text));
    case EAGAIN:
      throw Error(ErrorKind::kDisconnected,
                  fmt::format("too many connections wait at '{}': dial again", address.text));
    case EACCES:
    case EPERM:
      throw Error(ErrorKind::kDenied,
                  fmt::format("this user may not dial '{}': {}; workers of one job run as one user",
                              address.text, std::strerror(reason)));
    default:
      throw Error(ErrorKind::kDisconnected,
                  fmt::format("'{}' cannot be reached: {}", address.text, std::strerror(reason)));
  }
}

void send_small_messages_at_once(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// A socket may connect to itself if no worker listens at a port from the range that the system assigns to
/// dialers.
bool is_own_mirror(int socket) {
  sockaddr_storage mine{}, theirs{};
  socklen_t mine_size = sizeof mine, theirs_size = sizeof theirs;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&mine), &mine_size) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&theirs), &theirs_size) == 0 &&
         mine_size == theirs_size && std::memcmp(&mine, &theirs, mine_size) == 0;
}

void check_connected(int socket, const Address& address) {
  if (address.kind == Address::Kind::kUnix) {
    check_peer_user(socket, address.text, ::geteuid());
    return;
  }
  if (is_own_mirror(socket)) throw_dial(address, ECONNREFUSED);
  send_small_messages_at_once(socket);
}

std::string_view scheme_of(const Address& address) {
  return std::string_view(address.text).substr(0, address.text.find(':'));
}

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// Opens the directory and locks it against listeners that remove stale sockets there, until the result is
/// destroyed.
Descriptor hold_private_directory(const std::string& path) {
  const std::string name = directory_of(path);
  Descriptor directory(::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat about {};
  if (!directory || ::fstat(directory.get(), &about) != 0) {
    throw_invalid("the directory of socket '{}' cannot be opened: {}; make it with: mkdir -m 700 '{}'", path,
                  std::strerror(errno), name);
  }
  if (about.st_uid != ::geteuid() || (about.st_mode & 077) != 0) {
    throw Error(
        ErrorKind::kDenied,
        fmt::format(
            "directory '{0}' belongs to user {1} with mode {2:04o}, but worker sockets must be in a "
            "directory of this user ({3}) that is closed to others: chmod 700 '{0}', or use a new one "
            "from mkdir -m 700",
            name, about.st_uid, about.st_mode & 07777, ::geteuid()));
  }
  while (::flock(directory.get(), LOCK_EX) != 0) {
    if (errno != EINTR) {
      throw_invalid("directory '{}' cannot be locked: {}", name, std::strerror(errno));
    }
  }
  return directory;
}

/// Removes a socket file at which no process listens. Throws kInvalid if a process listens there, or if the
/// file is not a socket.
void remove_stale(const Address& address) {
  struct stat about {};
  if (::lstat(address.path.c_str(), &about) != 0) return;
  if (!S_ISSOCK(about.st_mode)) {
    throw_invalid("'{}' exists and is not a socket: remove it or listen elsewhere", address.path);
  }
  // A datagram socket cannot connect to a listener, which does not notice the attempt; the error shows
  // whether it exists.
  const Descriptor probe(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (::connect(probe.get(), address.raw(), address.socket_size) == 0 || errno != ECONNREFUSED) {
    throw_invalid("'{}' is in use by another process: end it or listen elsewhere (to find it: fuser '{}')",
                  address.text, address.path);
  }
  ::unlink(address.path.c_str());
}

}  // namespace

Dialed dial(const Address& address) {
  Descriptor socket = make_socket(address);
  int failed;
  do {
    failed = ::connect(socket.get(), address.raw(), address.socket_size);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0 && errno != EINPROGRESS) throw_dial(address, errno);
  if (failed != 0) return {std::move(socket), false};
  check_connected(socket.get(), address);
  return {std::move(socket), true};
}

void finish_dial(int socket, const Address& address) {
  int reason = 0;
  socklen_t size = sizeof reason;
  if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &reason, &size) != 0) reason = errno;
  if (reason != 0) throw_dial(address, reason);
  check_connected(socket, address);
}

void check_peer_user(int socket, const std::string& peer, uid_t expected) {
  ucred peer_user{};
  socklen_t size = sizeof peer_user;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer_user, &size) != 0) {
    throw Error(ErrorKind::kDenied,
                fmt::format("the user behind '{}' is unknown: {}", peer, std::strerror(errno)));
  }
  if (peer_user.uid != expected) {
    throw Error(
        ErrorKind::kDenied,
        fmt::format("'{}' is run by user {}, this worker by user {}: workers of one job run as one user",
                    peer, peer_user.uid, expected));
  }
}

std::string name_accepted(int socket, const Address& listener) {
  if (listener.kind == Address::Kind::kUnix) {
    ucred peer_user{};
    socklen_t size = sizeof peer_user;
    ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer_user, &size);
    return fmt::format("{} (process {})", listener.text, peer_user.pid);
  }
  send_small_messages_at_once(socket);
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size);
  return tcp_text(peer, scheme_of(listener));
}

Descriptor accept_connection(int listener) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    // The system assigns the lowest free number.
    const Descriptor next(::fcntl(listener, F_DUPFD_CLOEXEC, 0));
    const rlim_t spare = std::min(kSpareDescriptors, limit.rlim_cur / 4);
    if (next && static_cast<rlim_t>(next.get()) >= limit.rlim_cur - spare) {
      errno = EMFILE;
      return {};
    }
  }
  return Descriptor::not_inherited(
      [&] { return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
}

ListeningSocket::ListeningSocket(Address address)
    : address_(std::move(address)), socket_(make_socket(address_)) {
  address_.kind == Address::Kind::kUnix ? open_unix() : open_tcp();
}

ListeningSocket::~ListeningSocket() {
  if (!socket_ || inode_ == 0) return;
  struct stat about {};
  if (::lstat(address_.path.c_str(), &about) == 0 && about.st_dev == device_ && about.st_ino == inode_) {
    ::unlink(address_.path.c_str());
  }
}

void ListeningSocket::open_unix() {
  const Descriptor directory = hold_private_directory(address_.path);
  remove_stale(address_);
  struct stat about {};
  if (::bind(socket_.get(), address_.raw(), address_.socket_size) != 0 ||
      ::chmod(address_.path.c_str(), 0600) != 0 || ::lstat(address_.path.c_str(), &about) != 0 ||
      ::listen(socket_.get(), kBacklog) != 0) {
    throw_invalid("cannot listen at '{}': {}", address_.text, std::strerror(errno));
  }
  device_ = about.st_dev;
  inode_ = about.st_ino;
}

void ListeningSocket::open_tcp() {
  const int on = 1;
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(socket_.get(), address_.raw(), address_.socket_size) != 0 ||
      ::listen(socket_.get(), kBacklog) != 0) {
    const int reason = errno;
    if (reason == EADDRINUSE) {
      throw_invalid(
          "port {0} is in use ('{1}'): end the process that holds it (ss -ltnp 'sport = :{0}'), take another "
          "port, or port 0 for any free one",
          address_.port, address_.text);
    }
    throw_invalid("cannot listen at '{}': {}{}", address_.text, std::strerror(reason),
                  reason == EACCES ? "; ports below 1024 need privileges" : "");
  }
  address_.socket_size = sizeof address_.socket;
  ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address_.socket), &address_.socket_size);
  address_.text = tcp_text(address_.socket, scheme_of(address_));
  address_.port = ntohs(reinterpret_cast<const sockaddr_in&>(address_.socket).sin_port);
}

}  // namespace torchspan::net
