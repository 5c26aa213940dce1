#pragma once
#include <functional>
#include <span>
#include <sys/types.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>

namespace torchspan {

/// Owns a file descriptor and closes it in the destructor; -1 means none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  /// Holds what `make` returns (-1 on failure) and keeps errno. A child made by fork() does not inherit the
  /// descriptor: in the child the same number refers to /dev/null. Meant for sockets: an inherited copy would
  /// keep the connection and the port open after this process has died.
  static Descriptor not_inherited(const std::function<int()>& make);
  Descriptor(Descriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), inherited_(std::exchange(other.inherited_, true)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this == &other) return *this;
    reset(std::exchange(other.fd_, -1));
    inherited_ = std::exchange(other.inherited_, true);
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) inherited_ ? static_cast<void>(::close(fd_)) : close_not_inherited(fd_);
    fd_ = fd;
    inherited_ = true;
  }

 private:
  static void close_not_inherited(int fd);

  int fd_ = -1;
  bool inherited_ = true;
};

/// Sends bytes through a Unix socket, with `descriptor` unless that is -1. Returns the number of bytes sent, or
/// -1 and sets errno, like sendmsg(2).
ssize_t send_with_descriptor(int socket, BytesView bytes, int descriptor, int flags);

/// What receive_with_descriptors() received.
struct ReceivedBytes {
  ssize_t size = 0;        ///< as recvmsg(2): 0 at the end of the stream, -1 with errno
  bool truncated = false;  ///< descriptors were lost: too many at once, or this process has no more
  std::vector<Descriptor> descriptors = {};
};
/// Receives bytes into `place`, with up to 4 descriptors, from a Unix socket.
ReceivedBytes receive_with_descriptors(int socket, std::span<std::byte> place, int flags);

}  // namespace torchspan
