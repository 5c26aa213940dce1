#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::collective {

/// A backend that has this base has mapped the shared memory of all ranks.
class MapsPeers {
 public:
  virtual ~MapsPeers() = default;
  /// Collective; blocks. Returns where this process sees each rank's `mine`, a contiguous tensor from Group::allocate()
  /// with the same number of bytes on all ranks; nothing on all ranks if a rank has another tensor. The addresses are
  /// valid while the backend lives and the other ranks keep their tensors.
  virtual std::vector<std::byte*> peer_memory_of(const at::Tensor& mine) = 0;
};

}  // namespace torchspan::collective
