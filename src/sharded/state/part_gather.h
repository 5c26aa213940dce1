#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/future.h>

namespace torchspan::sharded {

/// An all-gather into one flat tensor of size() * chunk elements, in which rank r's part is at r * chunk. Large
/// parts arrive in place, without a second copy of the tensor. Do not touch the tensor before wait() returns.
class PartGather {
 public:
  PartGather() = default;
  /// Issues the operations. This rank's part must be in place. `chunk` must be equal on all ranks, or all of them
  /// fail.
  PartGather(const collective::Group& group, at::Tensor flat, std::int64_t chunk);

  bool running() const { return flat_.defined(); }
  /// Throws what the group throws.
  void wait();

 private:
  at::Tensor flat_;
  std::int64_t chunk_ = 0;
  std::vector<Future<at::Tensor>> parts_;     ///< by rank; or
  Future<std::vector<at::Tensor>> gathered_;  ///< all of them
};

}  // namespace torchspan::sharded
