#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>

namespace torchspan::collective {

/// What a backend can do that has mapped the shared memory of all ranks.
class SharesMemory {
 public:
  virtual ~SharesMemory() = default;
  /// As Group::all_gather_into_tensor(), which has checked the arguments, without a copy in between. `tensor` may be this
  /// rank's part of `output`.
  virtual Future<at::Tensor> all_gather_into(at::Tensor output, at::Tensor tensor) = 0;
  /// As Group::reduce_scatter_tensor(), likewise. `output` may be this rank's part of `tensor`.
  virtual Future<at::Tensor> reduce_scatter_into(at::Tensor output, at::Tensor tensor,
                                                 ReduceOp reduction) = 0;
  /// Collective; blocks. Returns where this process sees each rank's `mine`, a contiguous tensor from Group::allocate()
  /// with the same number of bytes on all ranks; nothing on all ranks if a rank has another tensor. The addresses are
  /// valid while the backend lives and the other ranks keep their tensors.
  virtual std::vector<std::byte*> peer_memory_of(const at::Tensor& mine) = 0;
};

}  // namespace torchspan::collective
