#include "core/api/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace torchspan {
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

}  // namespace torchspan
