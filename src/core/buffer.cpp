#include <cstdlib>
#include <fmt/format.h>
#include <limits>
#include <sys/mman.h>

#include <torchspan/core/buffer.h>
#include <torchspan/core/error.h>

namespace torchspan {
namespace {
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kHugeFrom = std::size_t{1} << 20;
}  // namespace

Buffer allocate_buffer(std::size_t size) {
  if (size == 0) return {};
  const std::size_t alignment = size >= kHugeFrom ? kHugePage : kAlignment;
  void* memory = nullptr;
  const bool countable = size <= std::numeric_limits<std::size_t>::max() - alignment;
  const std::size_t rounded = countable ? (size + alignment - 1) / alignment * alignment : size;
  if (countable) memory = std::aligned_alloc(alignment, rounded);
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
