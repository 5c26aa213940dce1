#include "net/local/memory.h"

#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/mman.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

SharedMemory map_unless_refused(const LocalFaults& faults, const Descriptor& descriptor, std::size_t size,
                                int flags) {
  if (fails(faults, LocalStep::kMapMemory)) {
    errno = ENOMEM;
    return {};
  }
  return SharedMemory::map(descriptor, size, flags);
}

}  // namespace

std::optional<NewMemory> make_memory(const LocalFaults& faults, std::size_t size) {
  if (fails(faults, LocalStep::kMakeMemory)) return std::nullopt;
  NewMemory made{{}, create_memory_file("torchspan")};
  if (!made.descriptor || fails(faults, LocalStep::kReserveMemory)) return std::nullopt;
  if (!seal_memory_file(made.descriptor, size, FilePages::kReserved)) return std::nullopt;
  made.memory = map_unless_refused(faults, made.descriptor, size, MAP_POPULATE);
  if (!made.memory) return std::nullopt;
  return made;
}

SharedMemory map_memory(const LocalFaults& faults, const Descriptor& descriptor, std::size_t size) {
  if (!is_sealed_memory_file(descriptor, size)) {
    throw Error(ErrorKind::kInvalid, "passed memory that is not sealed or is not of the announced size");
  }
  SharedMemory memory = map_unless_refused(faults, descriptor, size, 0);
  if (!memory) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("passed {} bytes of memory that cannot be mapped here: {}; lower "
                            "LocalOptions::pool_bytes there, or raise the memory limit of this process",
                            size, std::strerror(errno)));
  }
  return memory;
}

}  // namespace torchspan::net
