#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include <torchspan/detail/core/mutex.h>

#include "core/api/descriptor.h"

namespace torchspan::collective::shm {

/// Maps the shared memory of one rank into this process; the destructor unmaps it.
class Mapping {
 public:
  Mapping() = default;
  /// Maps a sealed memory file of exactly `size` bytes. Throws kInvalid for any other file, because it could
  /// shrink while it is mapped, and kOverloaded without address space.
  Mapping(const Descriptor& descriptor, std::uint64_t size);
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Mapping();

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  /// Whether `bytes` bytes from `offset` are inside; must be checked for every place that a peer names.
  bool holds(std::uint64_t offset, std::uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset;
  }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

/// The shared memory that one rank gives to its peers: an unnamed memory file with the size of all that it
/// may ever hold, of which only allocated pages use memory. Thread-safe.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// `size` zero means as much as the machine has memory. Throws kUnsupported if the system has no sealed
  /// memory files, kOverloaded without address space.
  static std::shared_ptr<Arena> make(std::uint64_t size);

  /// Returns zeroed memory that starts at a page; the last copy of the pointer frees it. The pointer keeps
  /// the arena alive. Throws kOverloaded when the arena or the machine is full.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  /// A range that no destructor frees: other processes may still read it.
  struct Stretch {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  /// Allocates like allocate(). A range that is never released lasts until the last process unmaps the arena.
  Stretch reserve(std::size_t bytes);
  void release(const Stretch& stretch) { give_back(stretch.offset, stretch.bytes); }

  const Descriptor& descriptor() const { return descriptor_; }
  const Mapping& mapping() const { return mapping_; }
  bool holds(const void* data, std::size_t bytes) const;
  std::uint64_t offset_of(const void* data) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - mapping_.data());
  }

 private:
  Arena(Descriptor descriptor, std::uint64_t size);
  /// Removes a free range of `bytes` bytes from the list and returns its offset; throws if there is none.
  std::uint64_t take(std::uint64_t bytes);
  /// Returns the pages to the system at once.
  void give_back(std::uint64_t offset, std::uint64_t bytes);

  const Descriptor descriptor_;
  const Mapping mapping_;
  Mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> free_ TORCHSPAN_GUARDED_BY(mutex_);  ///< offset → bytes
};

}  // namespace torchspan::collective::shm
