#pragma once
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Sums one step's gradients of tied parameters over all copies, so that all have the same bits: the first worker of a
/// tie adds those of all workers in the order of the tie, and sends the sum to the others. Used by the training thread.
class TiedGradients {
 public:
  TiedGradients(const LocalPipeline& local, StepId id);
  /// Puts `.grad` back if the step has failed.
  ~TiedGradients();
  TiedGradients(const TiedGradients&) = delete;
  TiedGradients& operator=(const TiedGradients&) = delete;

  /// Sets the gradients of earlier steps aside; before the first backward.
  void begin();
  /// Sends this worker's gradients; after its last backward.
  void send();
  /// Throws Error{kInvalid} for an event that no worker of the tie sends.
  void accept(TiedGradient& event);
  bool complete() const;
  /// Adds the sums to the gradients of earlier steps.
  void finish();

 private:
  struct Exchange {
    std::vector<at::Tensor> before;   ///< by copy
    std::map<int, at::Tensor> parts;  ///< on the first worker, by worker
    at::Tensor sum;
    bool done = false;
  };
  void add_part(std::size_t tie, int worker, at::Tensor gradient);
  void post(int to, std::size_t tie, at::Tensor gradient) const;

  const LocalPipeline& local_;
  const StepId id_;
  std::vector<Exchange> exchanges_;  ///< by tie
  bool begun_ = false;
};

}  // namespace torchspan::pipeline
