#pragma once
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Restores the buffers of a layer range's modules (running statistics and the like) to their values at
/// construction: a recomputed forward must not count twice.
class KeptBuffers {
 public:
  KeptBuffers(const LocalPipeline& local, const LayerRange& range);
  ~KeptBuffers();
  /// Throws LibTorch's error if the forward changed a buffer's shape. If an exception ends the scope, the
  /// destructor restores the rest and does not throw.
  void restore();
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  ///< the buffer, its former value
};

}  // namespace torchspan::pipeline
