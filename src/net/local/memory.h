#pragma once
#include <cstddef>
#include <optional>
#include <utility>

#include <torchspan/net/local.h>

#include "core/api/descriptor.h"

namespace torchspan::net {

/// A piece of shared memory as mapped here; unmapped with its owner.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(std::byte* data, std::size_t size) : data_(data), size_(size) {}
  SharedMemory(SharedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Whether a test wants this step to fail.
bool refused(const LocalOptions& options, LocalStep step);

struct NewMemory {
  SharedMemory memory;
  Descriptor descriptor;
};
/// Zeroed memory that nobody can shrink or grow, all pages there; nothing when the system refuses.
std::optional<NewMemory> make_memory(const LocalOptions& options, std::size_t size);

/// Maps what a peer made with make_memory(). Throws kInvalid when it is not of that size or could be shrunk
/// under our feet, kOverloaded when there is no room for it.
SharedMemory map_memory(const LocalOptions& options, const Descriptor& descriptor, std::size_t size);

}  // namespace torchspan::net
