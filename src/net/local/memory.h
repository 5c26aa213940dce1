#pragma once
#include <cstddef>
#include <optional>

#include "core/api/descriptor.h"
#include "net/local/local_faults.h"

namespace torchspan::net {

struct NewMemory {
  SharedMemory memory;
  Descriptor descriptor;
};
/// Makes zeroed, mapped memory with all its pages, which no process can shrink or grow; nullopt if the system
/// refuses.
std::optional<NewMemory> make_memory(const LocalFaults& faults, std::size_t size);

/// Maps memory that a peer made with make_memory(). Throws kInvalid if it has another size or is not sealed,
/// kOverloaded if it cannot be mapped.
SharedMemory map_memory(const LocalFaults& faults, const Descriptor& descriptor, std::size_t size);

}  // namespace torchspan::net
