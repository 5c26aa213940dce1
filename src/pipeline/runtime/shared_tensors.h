#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/layers.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Finds tensors that layers of different workers share: each owner's process has its own copy, so a change
/// on one worker does not reach the others.
/// Considers the parameters and buffers that exist before their layers are built: those of modules
/// passed to Layers::add_existing, and tensors and modules among the arguments of Layers::add.
class SharedTensors {
 public:
  explicit SharedTensors(const Layers& layers);

  /// One line for each tensor of this worker's layers that another layer refers to as well.
  std::string report(const LocalPipeline& local) const;

 private:
  /// Memory that a layer refers to.
  struct Extent {
    const void* storage = nullptr;
    std::int64_t begin = 0, end = 0;  ///< in bytes
    int layer = 0;
    std::int64_t id = 0;  ///< of the first extent that overlaps it; the same on all workers
  };
  static Extent extent_of(const at::Tensor& tensor);
  const Extent* find(const Extent& extent) const;

  std::vector<Extent> extents_;
  std::set<std::int64_t> shared_;  ///< ids that several layers refer to
};

/// Throws Error{kInvalid} if two workers report the same parameter and it requires gradients. Returns the
/// tensors of this worker that other workers have copies of; they must not change in a step.
std::vector<SharedConstant> check_shared_tensors(const LocalPipeline& local,
                                                 const std::vector<std::string>& reports);

}  // namespace torchspan::pipeline
