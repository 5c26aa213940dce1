#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline.h>
#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/plan.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/messages/event_queue.h"
#include "pipeline/plan/replica_grid.h"

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

/// Parameters of this worker whose gradients are exchanged with the other replicas in one message.
struct ReplicaBucket {
  std::vector<int>
      ranges;  ///< layer ranges that use them; when all their backwards have ended, gradients are complete
  bool tied = false;  ///< exchanged after the gradients of tied parameters were summed over stages
  int owner = 0;      ///< the replica that sums them
  std::vector<at::Tensor> parameters;
};

/// Another worker ended the step and reported the error to all.
class EndedElsewhere : public Error {
 public:
  using Error::Error;
  explicit EndedElsewhere(const Error& error) : Error(error) {}
};

/// One worker's part of a pipeline: the plan, the layers that this worker owns, and how it reaches the other workers.
/// Constant after creation.
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
  /// By layer range: names of the spans in which a worker waits there, for activations and for gradients.
  std::vector<std::pair<std::string, std::string>> wait_names = {};
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
  /// "the forward of micro-batch 2 through layer 'Linear' (order 3, stage 1 on 'worker1')".
  std::string describe(const schedule::Action& action) const;

  /// Sends a message without waiting for its reply. A failure becomes a NotSent in `event_queue`.
  template <rpc::Message M>
  void post(std::uint32_t rank, const M& message) const {
    worker.backend()->send(rank, rpc::make_request(message), event_on_failure(message.id, rank));
  }
  /// To the other workers of `to`.
  template <rpc::Message M>
  void post_to_all(const std::vector<std::uint32_t>& to, const M& message) const {
    for (const std::uint32_t rank : to) {
      if (rank != rank_of(me)) post(rank, message);
    }
  }
  /// Sets what AskState answers: what this worker does in a step from now on.
  void set_state(std::uint64_t step, bool in_step, bool busy, std::string doing) const {
    event_queue->set_state(step, in_step, busy, std::move(doing), executor().now());
  }

  /// The error that ends the step because a worker of the pipeline died, left or cannot be reached.
  Error unreachable(std::uint64_t step, std::uint32_t rank, const Error& reason) const;
  /// Throws if the event ends the step: EndedElsewhere for StepFailed, an Error for a worker of the pipeline
  /// that died, left or cannot be reached. Returns for other events and for workers of other pipelines.
  void throw_failure(std::uint64_t step, const StepEvent& event) const;
  /// Reports this worker's failure in a step to the other workers of the pipeline, and waits for a second at most
  /// until they have the report: if this worker leaves because of the error, its departure must not overtake it.
  void report_failure(std::uint64_t step, const Error& error) const;
  /// Throws if a worker of the pipeline died or left before the step.
  void check_presence(std::uint64_t step) const;

 private:
  std::shared_ptr<rpc::Completion> event_on_failure(StepId step, std::uint32_t rank) const;
};

/// Asks the other workers for their state while this worker waits in a step, and detects the worker that
/// blocks the step. Used by the training thread.
class StallWatch {
 public:
  explicit StallWatch(const LocalPipeline& local) : local_(local), since_(local.executor().now()) {}

  /// Restarts the timeout: an event arrived or an action ended.
  void progress() {
    since_ = local_.executor().now();
    asked_.clear();
  }
  /// How long to wait for an event before check().
  Duration patience() const;
  /// Asks the other workers, or checks their answers. Returns the error that ends the step if a worker blocks
  /// the others for longer than PipelineOptions::stall_timeout.
  std::optional<Error> check(std::uint64_t step, const std::string& waiting_for);

 private:
  struct Question {
    std::string worker;
    std::uint32_t rank = 0;
    Future<WorkerState> answer;
  };
  void ask(std::uint64_t step);
  /// Calls PipelineOptions::while_waiting.
  void call_user(std::uint64_t step, const std::string& waiting_for) const;

  const LocalPipeline& local_;
  TimePoint since_;
  std::vector<Question> asked_;
};

}  // namespace torchspan::pipeline
