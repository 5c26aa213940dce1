#pragma once
#include <cstdint>
#include <fstream>
#include <malloc.h>
#include <unistd.h>

namespace torchspan::testing {

/// Bytes that this process has allocated and not freed. Does not count pages and fragments, so a repeated
/// leak of a few bytes shows. Always zero under the sanitizers, whose allocator does not count.
inline std::int64_t heap_in_use() {
  const auto info = ::mallinfo2();
  return static_cast<std::int64_t>(info.uordblks + info.hblkhd);
}

/// Whether the process keeps freed memory, as the address sanitizer does.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kFreedMemoryIsKept = true;
#else
inline constexpr bool kFreedMemoryIsKept = false;
#endif

/// Bytes of memory of this process, and how many of them belong to files or are shared with other processes.
struct Resident {
  std::int64_t all = 0;
  std::int64_t shared = 0;
};
inline Resident resident() {
  std::ifstream file("/proc/self/statm");
  std::int64_t total = 0, pages = 0, shared = 0;
  file >> total >> pages >> shared;
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  return {pages * page, shared * page};
}

}  // namespace torchspan::testing
