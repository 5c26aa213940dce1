#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include <torchspan/detail/core/mutex.h>

#include "core/api/descriptor.h"

namespace torchspan::collective::shm {

/// Maps the arena of a rank: a sealed memory file of exactly `size` bytes. Throws kInvalid for any other file,
/// which could shrink under the mapping; kOverloaded without address space.
SharedMemory map_arena(const Descriptor& descriptor, std::uint64_t size);

/// The memory that one rank shares: an anonymous memory file of the largest allowed size. Only allocated
/// pages take memory. Thread-safe.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// `size` 0: the size of the machine's memory. Throws kUnsupported if the system has no sealed memory
  /// files, kOverloaded without address space.
  static std::shared_ptr<Arena> make(std::uint64_t size);

  /// Allocates zeroed, page-aligned memory, and releases it with the last copy of the pointer, which also
  /// keeps the arena. Throws kOverloaded if the arena or the machine is full.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  /// A range that no destructor releases, because other processes may still read it.
  struct Stretch {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  /// As allocate(). A range that is never released exists while any process maps the arena.
  Stretch reserve(std::size_t bytes);
  void release(const Stretch& stretch) { give_back(stretch.offset, stretch.bytes); }

  const Descriptor& descriptor() const { return descriptor_; }
  const SharedMemory& mapping() const { return mapping_; }
  bool holds(const void* data, std::size_t bytes) const;
  std::uint64_t offset_of(const void* data) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - mapping_.data());
  }

 private:
  Arena(Descriptor descriptor, std::uint64_t size);
  /// Removes a free range of `bytes` bytes from the list and returns its offset; throws if there is none.
  std::uint64_t take(std::uint64_t bytes);
  /// Returns the range to the list, and its pages to the system.
  void give_back(std::uint64_t offset, std::uint64_t bytes);

  const Descriptor descriptor_;
  const SharedMemory mapping_;
  Mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> free_ TORCHSPAN_GUARDED_BY(mutex_);  ///< offset → bytes
};

}  // namespace torchspan::collective::shm
