#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/executor.h>

#include "collective/shm/arena.h"

/// Unix sockets that pass memory between the processes of one user; every wait has a deadline.
namespace torchspan::collective::shm {

/// A memory file in transit, with a few bytes that describe it.
struct DescriptorMessage {
  Bytes bytes;
  Descriptor descriptor = {};
};

/// A connection that carries whole messages. Throws Error{kDisconnected} when the peer is gone, kTimedOut at
/// the deadline.
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

/// Listens under several names. A name that begins with '/' is a file, removed with the listener; processes
/// of other network namespaces can connect to it if they see the file. All other names are abstract:
/// processes of this network namespace can connect to them.
class UnixListener {
 public:
  /// Throws kUnsupported if the system has no such sockets; skips files that cannot be created.
  UnixListener(Executor& executor, const std::vector<std::string>& names);
  std::vector<std::string> names() const;
  static bool is_nameless(const std::string& name) { return !name.starts_with('/'); }
  /// Returns the next connection from a process of this user; rejects all others.
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

/// Throws kUnsupported if no worker listens there, and kDenied if the listener belongs to another user.
UnixConnection dial(Executor& executor, const std::string& name);

/// Bytes from the system's random source.
Bytes random_bytes(std::size_t size);

}  // namespace torchspan::collective::shm
