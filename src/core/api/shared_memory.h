#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/api/descriptor.h"

namespace torchspan {

/// Memory that is mapped into this process; the destructor unmaps it.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Takes over a mapping that mmap() returned.
  SharedMemory(std::byte* data, std::size_t size) : data_(data), size_(size) {}
  SharedMemory(SharedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~SharedMemory();

  /// Maps the first `size` bytes of `file` to read and write; `flags` are added to MAP_SHARED. Returns no
  /// memory and sets errno if the system refuses.
  static SharedMemory map(const Descriptor& file, std::size_t size, int flags = 0);

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  /// Whether `bytes` bytes from `offset` on lie inside. Check every place that a peer names.
  bool holds(std::uint64_t offset, std::uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Creates an empty memory file, which has no name in the file system; `label` appears in /proc. Returns no
/// descriptor and sets errno if the system refuses.
Descriptor create_memory_file(const char* label);

/// Whether the pages of a memory file exist from the beginning, or from their first use.
enum class FilePages : std::uint8_t { kReserved, kOnDemand };

/// Gives a memory file its size and seals it: no process can then shrink the file under a mapping, which
/// would kill its readers. Returns false and sets errno if the system refuses.
bool seal_memory_file(const Descriptor& file, std::size_t size, FilePages pages);

/// Whether `file` is a memory file of `size` bytes that seal_memory_file() sealed, in any process.
bool is_sealed_memory_file(const Descriptor& file, std::size_t size);

}  // namespace torchspan
