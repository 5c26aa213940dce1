#pragma once
#include <string>
#include <sys/types.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"
#include "net/stream/address.h"

namespace torchspan::net {

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
