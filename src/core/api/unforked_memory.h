#pragma once
#include <torchspan/detail/core/owner_process.h>

#include "core/api/descriptor.h"

namespace torchspan {

/// Memory that children made by fork() do not have. Only the process that mapped it unmaps it: a child may have other memory
/// at these addresses.
using UnforkedMemory = ProcessOwned<SharedMemory>;

/// Removes `memory` from the children that this process makes from now on.
UnforkedMemory not_inherited(SharedMemory memory);

/// Whether children made from now on have the pages of `size` bytes at `data`, which is at the beginning of a page.
void set_inherited(std::byte* data, std::size_t size, bool inherited);

}  // namespace torchspan
