#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <fmt/format.h>
#include <limits>
#include <sys/mman.h>
#include <unistd.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>

#include "core/api/throw_invalid.h"
#include "core/api/write_all.h"

namespace torchspan {

void ByteWriter::put_string(std::string_view text) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw_invalid("a string of {} bytes is longer than the wire's limit of 4 GiB", text.size());
  }
  put(static_cast<std::uint32_t>(text.size()));
  put_bytes(std::as_bytes(std::span(text.data(), text.size())));
}

void ByteWriter::throw_bad_patch(std::size_t offset, std::size_t size) const {
  throw_invalid("{} bytes at offset {} were never written; only {} bytes were", size, offset, bytes_.size());
}

std::string ByteReader::get_string() {
  const auto size = get<std::uint32_t>();
  BytesView raw = get_bytes(size);
  return std::string(reinterpret_cast<const char*>(raw.data()), raw.size());
}

std::size_t ByteReader::get_count(std::size_t least_size) {
  const std::size_t count = get<std::uint32_t>();
  least_size = std::max<std::size_t>(least_size, 1);
  if (count > left() / least_size) {
    throw_invalid("{} elements of {} bytes or more cannot be in the {} bytes left", count, least_size,
                  left());
  }
  return count;
}

void ByteReader::expect_end() const {
  if (!at_end()) {
    throw_invalid("{} bytes are left over at offset {}", left(), position_);
  }
}

void ByteReader::throw_truncated(std::size_t wanted) const {
  throw_invalid("bytes end early: {} wanted at offset {} of {}", wanted, position_, bytes_.size());
}

int write_all(int descriptor, BytesView bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written == 0) return EIO;
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return 0;
}

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
