#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Sets `.grad` of a parameter to the gradient of earlier steps, which it may change, plus that of this step.
void put_gradient(const at::Tensor& parameter, at::Tensor before, at::Tensor gradient);

/// Buckets of all parameters of this worker, the same on the workers of all replicas that own the same stages. Each
/// replica owns about as many bytes. Empty if there is one replica.
std::vector<ReplicaBucket> make_replica_buckets(const LocalPipeline& local);

/// Sends what this replica does in a step to all workers of the other replicas; on its first worker.
void announce_to_replicas(const LocalPipeline& local, const StepBegin& begin);

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

/// What a step exchanges besides activations: gradients of tied parameters between stages, and, between the replicas of
/// each stage, what they call, gradients, and statistics. Used by the training thread.
///
/// While backwards still run, each replica sums some buckets, weighted by the rows of each replica's batch, in the order of
/// replicas, and sends the sums to the others: all get the same bits. With no_sync, each replica keeps its gradients, which a
/// later step exchanges with its own.
class StepExchange {
 public:
  /// `begin` must outlive this.
  StepExchange(const LocalPipeline& local, const StepBegin& begin);
  /// Puts `.grad` back if the step has failed.
  ~StepExchange();
  StepExchange(const StepExchange&) = delete;
  StepExchange& operator=(const StepExchange&) = delete;

  /// Sets the gradients of earlier steps aside, once; before the first backward.
  void begin();
  /// A micro-batch's last backward through a layer range has ended. Sends the buckets that are complete.
  void backward_ended(int range);
  /// The last forward of this worker has ended: sends what its StepStatistics modules have gathered.
  void forwards_ended();
  /// The last backward of this worker has ended.
  void backwards_ended();
  /// Each throws Error{kInvalid} for an event that no other worker sends.
  void accept(TiedGradient& event) { tied_.accept(event); }
  void accept(ReplicaGradients& event);
  void accept(ReplicaStatistics& event);
  /// Also for a replica that does something else in this step; the text names both workers and the difference.
  void accept(const ReplicaBegin& event);
  /// Does what the events so far allow. Returns whether everything that was begun is complete.
  bool advance();
  /// Adds the gradients of the step to `.grad`. Once all workers have run their parts: until then, the step may fail.
  void commit();
  /// What is missing, as in Awaited::name; null: nothing.
  const char* waiting_for() const;

 private:
  /// A replica's gradients of a bucket.
  struct Part {
    std::int64_t rows = 0;
    std::vector<at::Tensor> gradients;  ///< by parameter
  };
  /// The exchange of a bucket.
  struct Exchange {
    int backwards = 0;               ///< that have not ended
    std::vector<at::Tensor> before;  ///< by parameter
    std::map<int, Part> parts;       ///< on the owner, by replica
    std::vector<at::Tensor> sums;
    bool done = false;
  };
  bool knows_replicas() const { return static_cast<int>(rows_.size()) == local_.grid.count(); }
  bool sums_complete() const { return !begun_ || left_ == 0; }
  bool statistics_complete() const;
  double own_weight() const;
  void send(std::size_t bucket);
  void add_part(std::size_t bucket, int replica, Part part);
  void post(int replica, std::size_t bucket, std::int64_t rows, std::vector<at::Tensor> gradients) const;
  bool fits(const ReplicaGradients& event) const;
  at::Tensor gradient_to_send(std::size_t bucket, std::size_t parameter) const;

  const LocalPipeline& local_;
  const StepBegin& begin_;
  std::map<int, std::int64_t> rows_;  ///< of the batches of the replicas that are known, by replica
  TiedGradients tied_;
  std::vector<Exchange> exchanges_;   ///< by bucket
  std::vector<std::size_t> waiting_;  ///< buckets that are complete and need the rows of the other replicas
  std::size_t left_ = 0;              ///< buckets without sums
  std::vector<StepStatistics*> modules_;  ///< owned by the layers; empty with one replica
  std::map<int, std::vector<std::vector<at::Tensor>>> statistics_;  ///< by replica, by module
  bool begun_ = false;             ///< begin() was called, and commit() was not
  bool tying_ = false;             ///< waits for gradients of tied parameters
  bool sends_statistics_ = false;  ///< until those of all replicas were given to the modules
};

}  // namespace torchspan::pipeline
