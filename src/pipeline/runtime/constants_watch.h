#pragma once
#include <cstdint>
#include <vector>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Detects steps that change a tensor of which other workers have copies.
class ConstantsWatch {
 public:
  explicit ConstantsWatch(const LocalPipeline& local);
  /// Throws Error{kInvalid} if a tensor changed since construction, or requires gradients.
  void check() const;

 private:
  const LocalPipeline& local_;
  std::vector<std::uint32_t> versions_;
};

}  // namespace torchspan::pipeline
