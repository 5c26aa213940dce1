#pragma once
#include <string>
#include <sys/types.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"
#include "net/stream/address.h"

namespace torchspan::net {

/// A socket that is being connected to `address`, or is already. Throws what on_closed reports: kDisconnected
/// when no worker listens there, kOverloaded without descriptors, kDenied when the system forbids it.
struct Dialed {
  Descriptor socket;
  bool connected;
};
Dialed dial(const Address& address);

/// The outcome of a connect() that was under way, once the socket is writable. Throws as dial().
void finish_dial(int socket, const Address& address);

/// Throws kDenied unless the process at the other end of a Unix socket runs as user `expected`.
void check_peer_user(int socket, const std::string& peer, uid_t expected);

/// The peer of an accepted socket as people know it: the process number of a Unix peer, the address of a TCP
/// one.
std::string name_accepted(int socket, const Address& listener);

/// Accepts the next connection; returns none and sets errno otherwise. EMFILE also while only few descriptors
/// of the process are left: its peers need some, and connections can wait.
Descriptor accept_connection(int listener);

/// An open listening socket; removes a Unix socket's file when it goes.
class ListeningSocket {
 public:
  /// Throws kInvalid (in use, no such directory) or kDenied (a Unix socket's directory that is open to
  /// others).
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
  dev_t device_ = 0;  ///< which file is ours to remove
  ino_t inode_ = 0;
};

}  // namespace torchspan::net
