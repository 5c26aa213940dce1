#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/pipeline.h>
#include <torchspan/pipeline/plan.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/messages/event_queue.h"
#include "pipeline/messages/message_router.h"
#include "pipeline/plan/replica_grid.h"
#include "pipeline/runtime/replica_buckets.h"

namespace torchspan::pipeline {

/// A tensor of which layers on other workers have copies.
struct SharedConstant {
  at::Tensor tensor;
  std::string holders;  ///< all layers that hold it, for an error
};

struct LayerParameter {
  int layer = 0;  ///< index into Plan::layers
  std::string name;
  at::Tensor tensor;
};

/// A parameter that several layers have copies of.
struct Tie {
  std::string name;                ///< of the first copy, for errors
  std::vector<int> workers;        ///< those with copies, by index; the first one sums their gradients
  std::vector<at::Tensor> copies;  ///< of this worker
};

/// Names of the spans in which a worker waits at a layer range.
struct WaitNames {
  std::string activations;
  std::string gradients;
};

/// One worker's part of a pipeline: the plan, and the layers that this worker owns. Constant after creation.
struct LocalPipeline {
  Worker worker;
  PipelineOptions options;
  Plan plan;
  int me = 0;                                   ///< index into plan.workers
  ReplicaGrid grid = {};                        ///< this replica's plan.workers, and those of the others
  std::vector<LayerUse> uses = {};              ///< by order
  std::vector<BuiltLayer> layers = {};          ///< by layer; empty for layers of other workers
  std::vector<LayerParameter> parameters = {};  ///< of this worker's layers when they were built, each once
  std::vector<SharedConstant> constants = {};
  std::vector<std::vector<TiedParameter>> declared_ties = {};
  std::vector<Tie> ties = {};                       ///< by declared tie
  std::vector<ReplicaBucket> replica_buckets = {};  ///< empty with one replica
  std::vector<WaitNames> wait_names = {};           ///< by layer range
  std::uint64_t id = 0;
  std::shared_ptr<EventQueue> event_queue = {};

  bool owns_layer_range(int range) const {
    return plan.layer_ranges[static_cast<std::size_t>(range)].worker == me;
  }
  /// The device with streams that has all parameters of one of this worker's layer ranges; nullopt if there is none.
  std::optional<c10::Device> device_of_range(int range) const;
  int first_worker() const { return plan.layer_ranges.front().worker; }
  int last_worker() const { return plan.layer_ranges.back().worker; }
  int last_layer_range() const { return static_cast<int>(plan.layer_ranges.size()) - 1; }
  /// Of plan.workers.
  const std::vector<std::uint32_t>& ranks() const { return grid.ranks[static_cast<std::size_t>(grid.mine)]; }
  std::uint32_t rank_of(int worker_index) const { return ranks()[static_cast<std::size_t>(worker_index)]; }
  /// Of the worker of another replica that owns the same stages.
  std::uint32_t rank_in_replica(int replica) const {
    return grid.ranks[static_cast<std::size_t>(replica)][static_cast<std::size_t>(me)];
  }
  Executor& executor() const { return worker.runtime().executor; }

  template <rpc::Message M>
  void post_to(int worker_index, const M& message) const;
  /// To the other workers of this replica.
  template <rpc::Message M>
  void post_to_all(const M& message) const;
  /// To the worker of another replica that owns the same stages.
  template <rpc::Message M>
  void post_to_replica(int replica, const M& message) const;
  /// To the other workers of all replicas.
  template <rpc::Message M>
  void post_to_everyone(const M& message) const;
};

template <rpc::Message M>
void LocalPipeline::post_to(int worker_index, const M& message) const {
  post(worker, event_queue, rank_of(worker_index), message);
}

template <rpc::Message M>
void LocalPipeline::post_to_all(const M& message) const {
  for (int worker_index = 0; worker_index < static_cast<int>(ranks().size()); ++worker_index) {
    if (worker_index != me) post_to(worker_index, message);
  }
}

template <rpc::Message M>
void LocalPipeline::post_to_replica(int replica, const M& message) const {
  post(worker, event_queue, rank_in_replica(replica), message);
}

template <rpc::Message M>
void LocalPipeline::post_to_everyone(const M& message) const {
  for (const std::uint32_t rank : grid.all_ranks()) {
    if (rank != ranks()[static_cast<std::size_t>(me)]) post(worker, event_queue, rank, message);
  }
}

}  // namespace torchspan::pipeline
