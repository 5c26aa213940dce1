#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/executor.h>

#include "collective/shm/arena.h"

/// Unix sockets that pass memory between the processes of one user; all waits have a deadline.
namespace torchspan::collective::shm {

/// A memory file on its way, with a few bytes about it.
struct DescriptorMessage {
  Bytes bytes;
  Descriptor descriptor = {};
};

/// A connection whose messages are whole. Throws Error{kDisconnected} when the peer is gone, kTimedOut at the
/// deadline.
class UnixConnection {
 public:
  UnixConnection(Executor& executor, Descriptor socket) : executor_(&executor), socket_(std::move(socket)) {}
  /// `descriptor` may be -1.
  void send(BytesView bytes, int descriptor, Deadline deadline);
  /// At most `most` bytes.
  DescriptorMessage receive(std::size_t most, Deadline deadline);
  Descriptor take_socket() { return std::move(socket_); }

 private:
  void wait_until_ready(bool writable, Deadline deadline);

  Executor* executor_;
  Descriptor socket_;
};

/// A listener under several names. One that begins with '/' is a file, which goes with the listener, and
/// which processes of other network namespaces can dial that see the file. All others are in no folder, open
/// to the processes of this network namespace.
class UnixListener {
 public:
  /// Throws kUnsupported when the system has no such thing; files that cannot be made are left out.
  UnixListener(Executor& executor, const std::vector<std::string>& names);
  std::vector<std::string> names() const;
  static bool is_nameless(const std::string& name) { return !name.starts_with('/'); }
  /// The next caller that runs as this user; others are turned away.
  UnixConnection accept(Deadline deadline);

 private:
  struct Listener {
    Listener(const std::string& name, Descriptor socket) : name(name), socket(std::move(socket)) {}
    Listener(Listener&& other) noexcept
        : name(std::exchange(other.name, {})), socket(std::move(other.socket)) {}
    Listener& operator=(Listener&&) = delete;
    ~Listener();
    std::string name;
    Descriptor socket;
  };
  std::optional<UnixConnection> accept_at(const Listener& listener);

  Executor& executor_;
  std::vector<Listener> listeners_;
};

/// Throws kUnsupported when no worker listens there, and kDenied when the listener is another user's.
UnixConnection dial(Executor& executor, const std::string& name);

/// Bytes from the system's random source.
Bytes random_bytes(std::size_t size);

}  // namespace torchspan::collective::shm
