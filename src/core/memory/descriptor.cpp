#include "core/api/descriptor.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "core/api/unforked_memory.h"

namespace torchspan {
namespace {

/// How many descriptors one message can pass.
constexpr std::size_t kMostDescriptors = 4;

/// The descriptors that children made by fork() do not inherit. fork() affects the whole process and its
/// handlers take no argument, so there is one list per process.
class NotInherited {
 public:
  NotInherited() { pthread_atfork(lock_all, unlock_all, replace_all); }

  int make(const std::function<int()>& make) {
    MutexLock lock(mutex_);
    const int fd = make();
    const int reason = errno;
    if (fd >= 0) fds_.push_back(fd);
    errno = reason;
    return fd;
  }
  void close(int fd) {
    MutexLock lock(mutex_);
    std::erase(fds_, fd);
    ::close(fd);
  }

 private:
  static void lock_all() TORCHSPAN_UNCHECKED;
  static void unlock_all() TORCHSPAN_UNCHECKED;
  static void replace_all() TORCHSPAN_UNCHECKED;

  Mutex mutex_;
  std::vector<int> fds_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Never destroyed: static objects of the program may close descriptors until the process exits.
NotInherited& not_inherited_descriptors() {
  static NotInherited& all = *new NotInherited;
  return all;
}

void NotInherited::lock_all() { not_inherited_descriptors().mutex_.lock(); }
void NotInherited::unlock_all() { not_inherited_descriptors().mutex_.unlock(); }

/// Runs in the child, where only async-signal-safe functions are allowed. The numbers stay in use, because
/// objects that the child copied still close them.
void NotInherited::replace_all() {
  NotInherited& all = not_inherited_descriptors();
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : all.fds_) {
    if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
  }
  if (nothing >= 0) ::close(nothing);
  all.fds_.clear();  // the child may reuse the numbers
  all.mutex_.unlock();
}

}  // namespace

Descriptor Descriptor::not_inherited(const std::function<int()>& make) {
  Descriptor made(not_inherited_descriptors().make(make));
  made.inherited_ = !made;
  return made;
}

void Descriptor::close_not_inherited(int fd) { not_inherited_descriptors().close(fd); }

ssize_t send_with_descriptor(int socket, BytesView bytes, int descriptor, int flags) {
  iovec place{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | flags);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

ReceivedBytes receive_with_descriptors(int socket, std::span<std::byte> place, int flags) {
  iovec bytes{place.data(), place.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control;
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ReceivedBytes received;
  do {
    received.size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
  } while (received.size < 0 && errno == EINTR);
  if (received.size < 0) return received;
  received.truncated = (message.msg_flags & MSG_CTRUNC) != 0;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(head) + at, sizeof descriptor);
      received.descriptors.emplace_back(descriptor);
    }
  }
  return received;
}

namespace {

constexpr int kMemorySeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

SharedMemory SharedMemory::map(const Descriptor& file, std::size_t size, int flags) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | flags, file.get(), 0);
  if (memory == MAP_FAILED) return {};
  return {static_cast<std::byte*>(memory), size};
}

UnforkedMemory not_inherited(SharedMemory memory) {
  if (memory) ::madvise(memory.data(), memory.size(), MADV_DONTFORK);
  return std::make_unique<SharedMemory>(std::move(memory));
}

Descriptor create_memory_file(const char* label) {
  return Descriptor(::memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
}

bool seal_memory_file(const Descriptor& file, std::size_t size, FilePages pages) {
  const auto length = static_cast<off_t>(size);
  const int sized =
      pages == FilePages::kReserved ? ::fallocate(file.get(), 0, 0, length) : ::ftruncate(file.get(), length);
  return sized == 0 && ::fcntl(file.get(), F_ADD_SEALS, kMemorySeals) == 0;
}

bool is_sealed_memory_file(const Descriptor& file, std::size_t size) {
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  struct stat about {};
  return seals >= 0 && (seals & kMemorySeals) == kMemorySeals && ::fstat(file.get(), &about) == 0 &&
         static_cast<std::size_t>(about.st_size) == size;
}

std::optional<ReservedPort> ReservedPort::take(std::uint16_t port) {
  Descriptor holder(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A name that begins with a zero byte does not name a file: the system removes it with the socket.
  const std::string name = "torchspan.port." + std::to_string(port);
  name.copy(static_cast<char*>(address.sun_path) + 1, name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  // If this system allows no such socket, the port is chosen without a reservation.
  if (bind(holder.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 && errno == EADDRINUSE)
    return std::nullopt;
  return ReservedPort(port, std::move(holder));
}

bool ReservedPort::is_free(std::uint16_t port, std::uint32_t address) {
  const Descriptor probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in wanted{};
  wanted.sin_family = AF_INET;
  wanted.sin_addr.s_addr = htonl(address);
  wanted.sin_port = htons(port);
  return bind(probe.get(), reinterpret_cast<const sockaddr*>(&wanted), sizeof wanted) == 0;
}

std::optional<ReservedPort> ReservedPort::draw(std::uint16_t first, std::uint16_t last,
                                               std::uint32_t address) {
  constexpr int kAttempts = 200;
  std::random_device random;
  std::uniform_int_distribution<int> number(first, last);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto port = static_cast<std::uint16_t>(number(random));
    auto reserved = take(port);
    if (reserved && is_free(port, address)) return reserved;
  }
  return std::nullopt;
}

}  // namespace torchspan
