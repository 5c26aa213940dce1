#pragma once
// All differences between the supported releases of torch that concern backends of torch.distributed.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device/api/torch_version.h"

namespace torchspan::python {

/// c10d::Backend with what newer releases added to it; in older ones, torch does not call it. Without data of its own.
class BackendOfAnyRelease : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
#if !TORCHSPAN_LIBTORCH_AT_LEAST(2, 14)
  virtual c10::intrusive_ptr<c10d::Work> gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                            const c10d::GatherOptions& options) = 0;
#endif
};

}  // namespace torchspan::python
