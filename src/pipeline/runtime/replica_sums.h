#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"
#include "pipeline/runtime/replica_begins.h"

namespace torchspan::pipeline {

/// Exchanges one step's gradients with the other replicas of this worker's stages, while backwards still run: each
/// replica sums some buckets, weighted by the rows of each replica's batch, in the order of replicas, and sends the
/// sums to the others. All replicas get the same bits. With no_sync, each replica keeps its gradients, which a later step
/// exchanges with its own. Used by the training thread.
class ReplicaSums {
 public:
  ReplicaSums(const LocalPipeline& local, const StepBegin& begin, const ReplicaBegins& begins);
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
  /// Sends the buckets that wait for the rows of the other replicas, once these are known.
  void rows_known();
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
  void post(int replica, std::size_t bucket, std::int64_t rows, std::vector<at::Tensor> gradients) const;
  bool fits(const ReplicaGradients& event) const;
  at::Tensor gradient_to_send(std::size_t bucket, std::size_t parameter) const;

  const LocalPipeline& local_;
  const StepId id_;
  const int micro_batches_;
  const bool no_sync_;
  const bool carries_;  ///< `.grad` has gradients of steps with no_sync
  const ReplicaBegins& begins_;
  std::vector<Exchange> exchanges_;   ///< by bucket
  std::vector<std::size_t> waiting_;  ///< buckets that are complete and need the rows of the other replicas
  std::size_t left_ = 0;              ///< buckets without sums
  bool begun_ = false;
};

}  // namespace torchspan::pipeline
