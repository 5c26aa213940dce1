#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Exchanges one step's gradients with the other replicas of this worker's stages, while backwards still run: each
/// replica sums some buckets, weighted by the rows of each replica's batch, in the order of replicas, and sends the
/// sums to the others. All replicas get the same bits. Used by the training thread.
class ReplicaSums {
 public:
  explicit ReplicaSums(const LocalPipeline& local, const StepBegin& begin);
  /// Puts `.grad` back if the step has failed.
  ~ReplicaSums();
  ReplicaSums(const ReplicaSums&) = delete;
  ReplicaSums& operator=(const ReplicaSums&) = delete;

  /// Sets the gradients of earlier steps aside; before the first backward.
  void begin();
  /// A micro-batch's last backward through a layer range has ended. Sends the buckets that are complete.
  void backward_ended(int range);
  /// The gradients of tied parameters are sums over the stages.
  void ties_ended();
  /// Throws Error{kInvalid} for an event that no replica of this stage sends.
  void accept(ReplicaGradients& event);
  bool complete() const { return !begun_ || left_ == 0; }
  /// Adds the sums to the gradients of earlier steps.
  void finish();

 private:
  struct Part {
    std::int64_t rows = 0;
    std::vector<at::Tensor> gradients;  ///< by parameter
  };
  struct Exchange {
    int backwards = 0;               ///< that have not ended
    std::vector<at::Tensor> before;  ///< by parameter
    std::map<int, Part> parts;       ///< on the owner, by replica
    std::vector<at::Tensor> sums;
    bool done = false;
  };
  void send(std::size_t bucket);
  void add_part(std::size_t bucket, int replica, Part part);
  bool fits(const ReplicaGradients& event) const;

  const LocalPipeline& local_;
  const StepId id_;
  const int micro_batches_;
  std::int64_t rows_ = 0;
  const double gradient_scale_;
  std::vector<Exchange> exchanges_;  ///< by bucket
  std::size_t left_ = 0;             ///< buckets without sums
  bool begun_ = false;
};

}  // namespace torchspan::pipeline
