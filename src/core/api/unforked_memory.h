#pragma once
#include <torchspan/detail/core/owner_process.h>

#include "core/api/descriptor.h"

namespace torchspan {

/// Memory that children made by fork() do not have. Only the process that mapped it unmaps it: a child may have other memory
/// at these addresses.
using UnforkedMemory = ProcessOwned<SharedMemory>;

/// Removes `memory` from the children that this process makes from now on.
UnforkedMemory not_inherited(SharedMemory memory);

}  // namespace torchspan
