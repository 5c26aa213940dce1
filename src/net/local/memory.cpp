#include "net/local/memory.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace torchspan::net {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

SharedMemory map(const LocalOptions& options, int descriptor, std::size_t size, int flags) {
  if (refused(options, LocalStep::kMapMemory)) {
    errno = ENOMEM;
    return {};
  }
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | flags, descriptor, 0);
  if (memory == MAP_FAILED) return {};
  return {static_cast<std::byte*>(memory), size};
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

bool refused(const LocalOptions& options, LocalStep step) { return options.refuse && options.refuse(step); }

std::optional<NewMemory> make_memory(const LocalOptions& options, std::size_t size) {
  if (refused(options, LocalStep::kMakeMemory)) return std::nullopt;
  NewMemory made{{}, Descriptor(::memfd_create("torchspan", MFD_CLOEXEC | MFD_ALLOW_SEALING))};
  if (!made.descriptor || refused(options, LocalStep::kReserveMemory)) return std::nullopt;
  if (::fallocate(made.descriptor.get(), 0, 0, static_cast<off_t>(size)) != 0) return std::nullopt;
  if (::fcntl(made.descriptor.get(), F_ADD_SEALS, kSeals) != 0) return std::nullopt;
  made.memory = map(options, made.descriptor.get(), size, MAP_POPULATE);
  if (made.memory.data() == nullptr) return std::nullopt;
  return made;
}

SharedMemory map_memory(const LocalOptions& options, const Descriptor& descriptor, std::size_t size) {
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  struct stat about {};
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(descriptor.get(), &about) != 0 ||
      static_cast<std::size_t>(about.st_size) != size) {
    throw Error(ErrorKind::kInvalid, "passed memory that is not sealed, or not of the size it said");
  }
  SharedMemory memory = map(options, descriptor.get(), size, 0);
  if (memory.data() == nullptr) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("passed {} bytes of memory that cannot be mapped here: {}; lower "
                            "LocalOptions::pool_bytes there, or give this process more",
                            size, std::strerror(errno)));
  }
  return memory;
}

}  // namespace torchspan::net
