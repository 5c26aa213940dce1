#include "collective/shm/arena.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/owner_process.h>

#include "collective/shm/unix_sockets.h"

namespace torchspan::collective::shm {
namespace {

constexpr std::uint64_t kPage = 4096;

std::uint64_t whole_pages(std::uint64_t bytes) {
  return bytes == 0 ? kPage : (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

SharedMemory map_arena(const Descriptor& descriptor, std::uint64_t size) {
  if (!is_sealed_memory_file(descriptor, size)) {
    throw_invalid(
        "a member of the group passed memory that is not sealed or does not have the size that it declared");
  }
  SharedMemory memory = SharedMemory::map(descriptor, size, MAP_NORESERVE);
  if (!memory) {
    throw Error(
        ErrorKind::kOverloaded,
        fmt::format("no address space for the {} bytes that a rank of this group may share: {}; lower "
                    "GroupOptions::shared_bytes, or raise this process's limit (ulimit -v)",
                    size, std::strerror(errno)));
  }
  ::madvise(memory.data(), size, MADV_DONTDUMP);
  return memory;
}

Arena::Arena(Descriptor descriptor, std::uint64_t size)
    : descriptor_(std::move(descriptor)), mapping_(map_arena(descriptor_, size)) {
  free_.emplace(0, size);
}

std::shared_ptr<Arena> Arena::make(std::uint64_t size) {
  if (size == 0) {
    size = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
           static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  }
  size = whole_pages(size);
  Descriptor descriptor = create_memory_file("torchspan group");
  if (!descriptor || !seal_memory_file(descriptor, size, FilePages::kOnDemand)) {
    throw_if_no_descriptor_is_left("the shared memory of a group");
    throw Error(ErrorKind::kUnsupported,
                fmt::format("this system has no sealed memory files (memfd_create): {}; use another backend",
                            std::strerror(errno)));
  }
  return std::shared_ptr<Arena>(new Arena(std::move(descriptor), size));
}

bool Arena::holds(const void* data, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(mapping_.data());
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  return at >= begin && mapping_.holds(at - begin, bytes);
}

Arena::Stretch Arena::reserve(std::size_t bytes) {
  const std::uint64_t taken = whole_pages(bytes);
  const std::uint64_t offset = take(taken);
  if (::fallocate(descriptor_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(taken)) != 0) {
    const int reason = errno;
    give_back(offset, taken);
    throw Error(ErrorKind::kOverloaded, fmt::format("the system has no {} bytes of shared memory left: {}; "
                                                    "free memory, or raise the container's limit",
                                                    bytes, std::strerror(reason)));
  }
#if defined(MADV_POPULATE_WRITE)
  ::madvise(mapping_.data() + offset, taken, MADV_POPULATE_WRITE);
#endif
  return {offset, taken};
}

std::shared_ptr<std::byte> Arena::allocate(std::size_t bytes) {
  const Stretch stretch = reserve(bytes);
  struct Allocation {
    ~Allocation() { arena->release(stretch); }
    const std::shared_ptr<Arena> arena;
    const Stretch stretch;
  };
  const std::shared_ptr<Allocation> allocation =
      ProcessOwned<Allocation>(new Allocation{shared_from_this(), stretch});
  return {allocation, mapping_.data() + stretch.offset};
}

std::uint64_t Arena::take(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  for (auto place = free_.begin(); place != free_.end(); ++place) {
    const auto [offset, size] = *place;
    if (size < bytes) continue;
    free_.erase(place);
    if (size > bytes) free_.emplace(offset + bytes, size - bytes);
    return offset;
  }
  throw Error(ErrorKind::kOverloaded,
              fmt::format("{} bytes do not fit into the rest of the {} bytes that this rank may share; raise "
                          "GroupOptions::shared_bytes, or release tensors from allocate()",
                          bytes, mapping_.size()));
}

void Arena::give_back(std::uint64_t offset, std::uint64_t bytes) {
  ::fallocate(descriptor_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
  MutexLock lock(mutex_);
  auto place = free_.emplace(offset, bytes).first;
  if (const auto next = std::next(place);
      next != free_.end() && place->first + place->second == next->first) {
    place->second += next->second;
    free_.erase(next);
  }
  if (place == free_.begin()) return;
  const auto before = std::prev(place);
  if (before->first + before->second != place->first) return;
  before->second += place->second;
  free_.erase(place);
}

}  // namespace torchspan::collective::shm
