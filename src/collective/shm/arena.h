#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include <torchspan/detail/core/mutex.h>

#include "core/api/shared_memory.h"

namespace torchspan::collective::shm {

/// Maps the arena of a rank: a sealed memory file of exactly `size` bytes. Throws kInvalid for any other file,
/// which could shrink under the mapping; kOverloaded without address space.
SharedMemory map_arena(const Descriptor& descriptor, std::uint64_t size);

/// The shared memory that one rank hands out: a memory file with no name, as long as all that it may ever
/// hold, whose pages exist only where something was allocated. Thread-safe.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// `size` zero: as much as the machine has memory. Throws kUnsupported when the system has no sealed memory
  /// files, kOverloaded without address space.
  static std::shared_ptr<Arena> make(std::uint64_t size);

  /// Zeroed memory from a page's start, given back with the last copy of the pointer, which keeps the arena.
  /// Throws kOverloaded when the arena or the machine is full.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  /// A stretch that nobody's destructor gives back: other processes may still look at it.
  struct Stretch {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  /// As allocate(). What is never released lasts as long as somebody maps the arena.
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
  /// The place of a free stretch of `bytes` bytes, taken out of the list; throws when there is none.
  std::uint64_t take(std::uint64_t bytes);
  /// The pages go back to the system at once.
  void give_back(std::uint64_t offset, std::uint64_t bytes);

  const Descriptor descriptor_;
  const SharedMemory mapping_;
  Mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> free_ TORCHSPAN_GUARDED_BY(mutex_);  ///< offset → bytes
};

}  // namespace torchspan::collective::shm
