#pragma once
#include <optional>
#include <string>

#include <torchspan/core/bytes.h>
#include <torchspan/core/executor.h>

#include "collective/shm/arena.h"

/// Unix sockets that pass memory between the processes of one user; all waits have a deadline.
namespace torchspan::collective::shm {

/// A memory file on its way, with a few bytes about it.
struct Parcel {
  Bytes bytes;
  Descriptor descriptor = {};
};

/// A connection whose messages are whole. Throws Error{kDisconnected} when the peer is gone, kTimedOut at the
/// deadline.
class Passage {
 public:
  Passage(Executor& executor, Descriptor socket) : executor_(executor), socket_(std::move(socket)) {}
  /// `descriptor` may be -1.
  void send(BytesView bytes, int descriptor, Deadline deadline);
  /// At most `most` bytes.
  Parcel receive(std::size_t most, Deadline deadline);
  Descriptor take_socket() { return std::move(socket_); }

 private:
  void wait_until_ready(bool writable, Deadline deadline);

  Executor& executor_;
  Descriptor socket_;
};

/// A listener in the system's nameless namespace: `name` in no folder, open to processes of this host.
class Doorway {
 public:
  /// Throws kUnsupported when the system has no such thing.
  Doorway(Executor& executor, std::string name);
  const std::string& name() const { return name_; }
  /// The next caller that runs as this user; others are turned away.
  Passage accept(Deadline deadline);

 private:
  Executor& executor_;
  const std::string name_;
  Descriptor socket_;
};

/// Throws kUnsupported when nobody listens there, and kDenied when the listener is another user's.
Passage dial(Executor& executor, const std::string& name);

/// Bytes from the system's random source.
Bytes random_bytes(std::size_t size);

}  // namespace torchspan::collective::shm
