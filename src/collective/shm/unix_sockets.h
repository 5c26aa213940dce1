#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>

#include "collective/shm/arena.h"

/// Unix sockets that pass memory between the processes of one user; all waits have a deadline.
namespace torchspan::collective::shm {

/// This process, or the system, has no file descriptor left: kOverloaded. Ranks that share no memory need descriptors, too.
struct NoDescriptorLeft : Error {
  using Error::Error;
};

/// Throws NoDescriptorLeft if errno says that there is none for `what`.
void throw_if_no_descriptor_is_left(const char* what);

/// A message with a memory file and a few bytes.
struct DescriptorMessage {
  Bytes bytes;
  Descriptor descriptor = {};
};

/// A connection that keeps message boundaries. Throws Error{kDisconnected} if the peer closed it, kTimedOut
/// at the deadline.
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

/// A listener with several names. A name that begins with '/' is a file, which the destructor removes;
/// processes of other network namespaces can connect through it if they see the file. Other names are
/// abstract: only processes of this network namespace can connect.
class UnixListener {
 public:
  /// Throws kUnsupported if the system has no Unix sockets; skips files that cannot be created.
  UnixListener(Executor& executor, const std::vector<std::string>& names);
  std::vector<std::string> names() const;
  static bool is_nameless(const std::string& name) { return !name.starts_with('/'); }
  /// Returns the next connection from this user; rejects connections of other users.
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

/// Throws kUnsupported if no process listens there, and kDenied if the listener belongs to another user.
UnixConnection dial(Executor& executor, const std::string& name);

/// Bytes from the system's random source.
Bytes random_bytes(std::size_t size);

}  // namespace torchspan::collective::shm
