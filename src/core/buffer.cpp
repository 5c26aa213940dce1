#include <cstdlib>
#include <new>
#include <sys/mman.h>

#include <torchspan/core/buffer.h>

namespace torchspan {
namespace {
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kHugeFrom = std::size_t{1} << 20;
}  // namespace

Buffer allocate_buffer(std::size_t size) {
  if (size == 0) return {};
  const std::size_t alignment = size >= kHugeFrom ? kHugePage : kAlignment;
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(alignment, rounded));
  if (data == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
  return {data, size, std::shared_ptr<void>(data, [](void* memory) { std::free(memory); })};
}

}  // namespace torchspan
