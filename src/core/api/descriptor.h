#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
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

/// Memory that is mapped into this process; the destructor unmaps it.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Takes over a mapping that mmap() returned.
  SharedMemory(std::byte* data, std::size_t size) : data_(data), size_(size) {}
  SharedMemory(SharedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~SharedMemory();

  /// Maps the first `size` bytes of `file` to read and write; `flags` are added to MAP_SHARED. Returns no
  /// memory and sets errno if the system refuses.
  static SharedMemory map(const Descriptor& file, std::size_t size, int flags = 0);

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  /// Whether `bytes` bytes from `offset` on lie inside. Check every place that a peer names.
  bool holds(std::uint64_t offset, std::uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Creates an empty memory file, which has no name in the file system; `label` appears in /proc. Returns no
/// descriptor and sets errno if the system refuses.
Descriptor create_memory_file(const char* label);

/// Whether the pages of a memory file exist from the beginning, or from their first use.
enum class FilePages : std::uint8_t { kReserved, kOnDemand };

/// Gives a memory file its size and seals it: no process can then shrink the file under a mapping, which
/// would kill its readers. Returns false and sets errno if the system refuses.
bool seal_memory_file(const Descriptor& file, std::size_t size, FilePages pages);

/// Whether `file` is a memory file of `size` bytes that seal_memory_file() sealed, in any process.
bool is_sealed_memory_file(const Descriptor& file, std::size_t size);

/// A TCP port that was chosen for a process that starts later. Until this object is destroyed or its process ends, other
/// programs in this network namespace that reserve theirs get different ones. It does not listen at the port.
class ReservedPort {
 public:
  /// Nullopt if another program has reserved it.
  static std::optional<ReservedPort> take(std::uint16_t port);
  /// Draws a port from `first` to `last` that is free at an IPv4 address in host byte order. Nullopt if it finds none.
  static std::optional<ReservedPort> draw(std::uint16_t first, std::uint16_t last, std::uint32_t address);
  /// Whether a program could listen at the port now.
  static bool is_free(std::uint16_t port, std::uint32_t address);

  std::uint16_t number() const { return number_; }

 private:
  ReservedPort(std::uint16_t number, Descriptor holder) : number_(number), holder_(std::move(holder)) {}

  std::uint16_t number_;
  Descriptor holder_;  ///< a Unix socket whose abstract name contains the port
};

}  // namespace torchspan
