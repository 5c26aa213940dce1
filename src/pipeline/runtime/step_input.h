#pragma once
#include <map>
#include <vector>

#include "pipeline/runtime/activation.h"
#include "pipeline/runtime/local_pipeline.h"
#include "pipeline/runtime/row_split.h"

namespace torchspan::pipeline {

/// The input of a step on the worker of the first layer range, and the gradients that come back to it.
class StepInput {
 public:
  StepInput(const LocalPipeline& local, const StepBegin& begin, Batch input);

  Activation micro_batch(int micro_batch) const;
  void put_gradients(int micro_batch, std::vector<at::Tensor> gradients);
  /// Runs the backward of the graph before the input, from the gradients of all micro-batches. Does nothing if
  /// there are none.
  void backward();

 private:
  at::Tensor whole_gradient(std::size_t member) const;

  const LocalPipeline& local_;
  const StepId id_;
  const bool has_backwards_;
  const RowSplit split_;
  const Batch input_;
  std::map<int, std::vector<at::Tensor>> gradients_;  ///< by micro-batch
};

}  // namespace torchspan::pipeline
