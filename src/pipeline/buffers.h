#pragma once
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/local_pipeline.h"

namespace torchspan::pipeline {

/// Gives the buffers of a segment's modules (running statistics and the like) at the end of a scope the
/// values that they had at its beginning: a forward that is computed again must not count twice.
class KeptBuffers {
 public:
  KeptBuffers(const LocalPipeline& local, const LayerRange& segment);
  ~KeptBuffers();
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  ///< the buffer, its former value
};

}  // namespace torchspan::pipeline
