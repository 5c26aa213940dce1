#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/runtime/activation.h"

namespace torchspan::pipeline {

/// The output of a step on the worker of the last layer range. Joins the outputs of the micro-batches, and
/// splits the gradients of the whole output.
class StepOutput {
 public:
  explicit StepOutput(int micro_batches)
      : outputs_(static_cast<std::size_t>(micro_batches)),
        rows_(outputs_.size()),
        wants_gradient_(outputs_.size()) {}

  void put(int micro_batch, Activation activation);
  /// Returns the whole output, once. Members that need gradients become leaves that require them.
  Batch take();
  bool wants_gradients(int micro_batch) const;
  /// Gradients by micro-batch and member, from those of the whole output by member.
  std::vector<std::vector<at::Tensor>> split(const std::vector<at::Tensor>& gradients) const;

 private:
  // All by micro-batch.
  std::vector<Batch> outputs_;                             ///< until take()
  std::vector<std::vector<std::int64_t>> rows_;            ///< by member; -1: a tensor without rows
  std::vector<std::vector<std::uint8_t>> wants_gradient_;  ///< by member
};

}  // namespace torchspan::pipeline
