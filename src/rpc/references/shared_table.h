#pragma once
#include <torchspan/detail/core/mutex.h>

#include "rpc/references/rref_table.h"

namespace torchspan::rpc {

/// A worker's table of references and its lock, which is never held while sending or destroying.
struct SharedRRefTable {
  explicit SharedRRefTable(std::uint32_t self) : table(self) {}

  mutable Mutex mutex;
  RRefTable table TORCHSPAN_GUARDED_BY(mutex);
};

}  // namespace torchspan::rpc
