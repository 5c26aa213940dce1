#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <torchspan/core/error.h>
#include <torchspan/core/time.h>

#include "core/api/descriptor.h"

namespace torchspan::net {

/// Pieces of memory in one system call: of messages to send, and to receive into.
inline constexpr std::size_t kSendIovecs = 64;
inline constexpr std::size_t kReceiveIovecs = 15;

/// While a channel is corked, messages of up to kSmallMessage bytes are collected, up to kMaxCorked bytes.
inline constexpr std::uint64_t kSmallMessage = 4 << 10;
inline constexpr std::uint64_t kMaxCorked = 64 << 10;

/// Connections accepted in one poll, and the pause after the process ran out of descriptors.
inline constexpr int kMaxAcceptsPerPoll = 64;
inline constexpr Duration kPauseWithoutDescriptors = std::chrono::milliseconds(100);

/// A deadline that has passed: do not wait.
inline constexpr Deadline kNoWait{TimePoint::min()};

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

/// Sends without waiting. Returns the bytes that the system took; 0 if the socket is full; -1, with errno, if
/// the connection is broken.
ssize_t send_now(int socket, std::span<const iovec> places);

/// Formats the address of a TCP socket: "scheme:host:port".
std::string tcp_text(const sockaddr_storage& socket, std::string_view scheme = "tcp");

/// Dials `address`; the socket is connected or being connected. Throws what on_closed reports: kDisconnected
/// if no worker listens there, kOverloaded without descriptors, kDenied if the system forbids it.
struct Dialed {
  Descriptor socket;
  bool connected;
};
Dialed dial(const Address& address);

/// Completes a dial() whose socket has become writable. Throws as dial().
void finish_dial(int socket, const Address& address);

/// Throws kDenied unless the process at the other end of a Unix socket runs as user `expected`.
void check_peer_user(int socket, const std::string& peer, uid_t expected);

/// Names the peer of an accepted socket for messages: by its process number (Unix) or its address (TCP).
std::string name_accepted(int socket, const Address& listener);

/// Accepts the next connection; returns none and sets errno otherwise. EMFILE also while only few descriptors
/// of the process are left: its peers need some, and connections can wait.
Descriptor accept_connection(int listener);

/// An open listening socket; the destructor removes the file of a Unix socket.
class ListeningSocket {
 public:
  /// Throws kInvalid (in use, no such directory) or kDenied (a Unix socket in a directory that other users
  /// can enter).
  explicit ListeningSocket(Address address);
  ListeningSocket(ListeningSocket&&) = default;
  ~ListeningSocket();

  int get() const { return socket_.get(); }
  const Address& address() const { return address_; }

 private:
  void open_unix();
  void open_tcp();

  Address address_;
  Descriptor socket_;
  dev_t device_ = 0;  ///< of the file to remove
  ino_t inode_ = 0;
};

}  // namespace torchspan::net
