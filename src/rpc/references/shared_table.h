#pragma once
#include <torchspan/detail/core/mutex.h>

#include "rpc/references/rref_table.h"

namespace torchspan::rpc {

/// Holds a worker's table of references and its lock, which is never held during a send or a destruction.
struct SharedRRefTable {
  explicit SharedRRefTable(std::uint32_t self) : table(self) {}

  mutable Mutex mutex;
  RRefTable table TORCHSPAN_GUARDED_BY(mutex);
};

}  // namespace torchspan::rpc
