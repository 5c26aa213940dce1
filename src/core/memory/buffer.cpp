#include <cstddef>
#include <cstdlib>
#include <fmt/format.h>
#include <limits>
#include <sys/mman.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan {
namespace {
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kHugeFrom = std::size_t{1} << 20;
constexpr std::size_t kMost =
    std::numeric_limits<std::ptrdiff_t>::max() - kHugePage;  // rounds up without overflow
}  // namespace

Buffer allocate_buffer(std::size_t size) {
  if (size == 0) return {};
  const std::size_t alignment = size >= kHugeFrom ? kHugePage : kAlignment;
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = size <= kMost ? std::aligned_alloc(alignment, rounded) : nullptr;
  if (memory == nullptr) {
    throw Error(
        ErrorKind::kOverloaded,
        fmt::format("no memory for a buffer of {} bytes; send less at once, or give this process more",
                    size));
  }
  auto* data = static_cast<std::byte*>(memory);
  if (alignment == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
  return {data, size, std::shared_ptr<void>(data, [](void* owned) { std::free(owned); })};
}

}  // namespace torchspan
