#pragma once
#include <cstdint>
#include <vector>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Throws when a step changes a tensor that layers of other workers have copies of.
class ConstantsWatch {
 public:
  explicit ConstantsWatch(const LocalPipeline& local);
  void check() const;

 private:
  const LocalPipeline& local_;
  std::vector<std::uint32_t> versions_;
};

}  // namespace torchspan::pipeline
