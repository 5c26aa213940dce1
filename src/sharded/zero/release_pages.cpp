#include "sharded/zero/release_pages.h"

#include <cstdint>
#include <sys/mman.h>
#include <unistd.h>

namespace torchspan::sharded {

void release_pages(const at::Tensor& values) {
  if (!values.is_cpu() || values.nbytes() == 0) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<std::uintptr_t>(values.data_ptr());
  const std::uintptr_t begin = (data + page - 1) / page * page, end = (data + values.nbytes()) / page * page;
  if (begin >= end) return;
  auto* const pages = reinterpret_cast<void*>(begin);
  // The first is for shared memory and fails for other memory, the second is for that.
  if (::madvise(pages, end - begin, MADV_REMOVE) != 0) ::madvise(pages, end - begin, MADV_DONTNEED);
}

}  // namespace torchspan::sharded
