#pragma once
// Pipelines over workers: layers, plans, schedules, balance. DeferredBatchNorm is in pipeline/deferred_batch_norm.h.
// Includes no torch/nn.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/plan.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/schedule.h>
#include <torchspan/state/source.h>

/// Pipeline parallelism: layers of a model on several workers, run on micro-batches.
namespace torchspan::pipeline {

/// What determines the order of actions on a worker.
enum class Schedule : std::uint8_t {
  kArrival,      ///< runs actions in order of arrival
  kGPipe,        ///< all forwards, then all backwards
  k1F1B,         ///< runs a backward as soon as one is ready; bounded memory
  kInterleaved,  ///< several stages per worker; a smaller bubble
  kZBH1,         ///< one stage per worker; input and weight gradients apart, which shrinks the bubble
  kZBH2,         ///< the same with twice the activations and almost no bubble
  kZB1P,         ///< kZBH1 with several stages per worker
  kZBV,          ///< two stages per worker, placed in a V; almost no bubble with the activations of k1F1B
  kDualPipeV,    ///< the same placement; pairs of a forward and a backward
  kCustom,       ///< PipelineOptions::custom_schedule
};

/// Which micro-batches keep only their inputs and recompute activations for the backward.
enum class ActivationCheckpoint : std::uint8_t { kNever, kExceptLast, kAlways };

struct PipelineOptions {
  std::vector<int> balance = {};  ///< distinct layers per stage; empty: even
  /// Owner of each stage; empty: stage s on rank s modulo the world size; kZBV and kDualPipeV: in a V. With
  /// replicas: those of replica 0, then of replica 1, and so on; empty: as many consecutive ranks for each.
  std::vector<std::string> workers = {};
  /// Data parallelism: copies of the whole pipeline, each on its own workers and with its own batches. A step's loss and
  /// gradients are the means over the rows of all replicas, and have the same bits in all.
  int replicas = 1;
  int micro_batches = 1;  ///< upper bound; a small batch has fewer
  Schedule schedule = Schedule::k1F1B;
  /// The table of a training step for kCustom, of the given placement and the same on all workers: one of
  /// schedule.h, one from a CSV file, or another. A stage of it is a layer range of the plan.
  std::function<schedule::Table(const schedule::Placement&)> custom_schedule = {};
  ActivationCheckpoint checkpoint = ActivationCheckpoint::kExceptLast;
  /// Layers (numbers in the order of Layers::add) that recompute under `checkpoint`: each use keeps its input, and the
  /// graphs of all other layers are kept. Empty: all layers, a layer range at a time, which keeps the least.
  std::vector<int> checkpoint_layers = {};
  /// Copies the inputs that checkpointed micro-batches keep to host memory after the forward, and back before the
  /// backward. Needs layers on GPUs, on all workers, and `checkpoint`; not with checkpoint_layers.
  bool offload = false;
  /// 0: a step ends on all workers before train_step() returns. 1: steps overlap, without a bubble between them:
  /// train_step() begins its batch and ends that of the previous call, whose gradients were computed with the
  /// parameters of one optimizer step earlier (Narayanan et al., PipeDream-2BW, 2021). Needs a second copy of the
  /// parameters. Not with kArrival or DeferredBatchNorm.
  int staleness = 0;
  /// Maximum number of micro-batches between their first forward and their last backward, which bounds
  /// memory; 0: what the schedule needs (kArrival: twice the number of workers). For kArrival and k1F1B.
  int max_in_flight = 0;
  /// Seeds the initial weights of each layer by (seed, layer), and the random numbers of each use and of
  /// the loss by (seed, step, order, micro-batch). Weights and dropout then do not depend on how the model
  /// is split or scheduled. Unset: weights derive from a number that the first worker draws when the
  /// pipeline is created, and uses draw from their worker's generator.
  std::optional<std::uint64_t> seed = {};
  /// Limit of one action, and of the wait for a worker to begin the step. After it the step fails on all
  /// workers.
  Duration stall_timeout = std::chrono::minutes(10);
  /// Called about once a second while this worker waits in a step, on its training thread, or while the pipeline is created.
  /// If it throws, the step ends on all workers, or the creation on this one: lets a program react to signals.
  std::function<void()> while_waiting = {};
  /// In errors; the same on all workers, and unique among their pipelines.
  std::string name = "pipeline";
};

/// Options of one step. Only those of the worker of the first layer range have an effect.
struct StepOptions {
  /// Factor of the loss before its backward; 1/k accumulates the mean over k steps. The same in all replicas.
  double gradient_scale = 1;
  /// On the worker of the first layer range: its first backward waits for this future, so that one
  /// controller can let all forwards finish first.
  Future<void> before_first_backward = {};
  /// With replicas: each one keeps its own gradients, multiplied by its rows over the mean rows of the replicas, in
  /// `.grad`; the next step without no_sync exchanges them as well. Accumulates k batches with one exchange. The same
  /// in all replicas; not with staleness 1.
  bool no_sync = false;
};

/// Seed of LibTorch's generator for one use of a layer under PipelineOptions::seed; use it to reproduce the
/// numbers in one process. `step` is Pipeline::training_steps() before the call, one more if a batch is in flight;
/// without gradients, 2^63 plus the number of such calls before. Orders count from 0; the loss has the one after the last
/// use. Micro-batches count over all replicas: replica * PipelineOptions::micro_batches + number.
std::uint64_t seed_of_use(std::uint64_t seed, std::uint64_t step, int order, int micro_batch);
/// Seed for building layer number `layer`, counted from 0.
std::uint64_t seed_of_layer(std::uint64_t seed, int layer);

/// The loss of one micro-batch: a scalar, the mean over its rows.
using Loss = std::function<at::Tensor(const Batch& output, const Batch& target)>;

namespace loss_detail {

/// What a loss with parameters of types A and B gets: the whole batch for a Batch, the only tensor for other types.
template <class A, class B>
struct Parameters {
  template <class T>
  using Value = std::conditional_t<std::is_same_v<std::remove_cvref_t<T>, Batch>, Batch, at::Tensor>;
  using Output = Value<A>;
  using Target = Value<B>;
};

// Not defined: they deduce the types of parameters.
template <class R, class A, class B>
Parameters<A, B> parameters_of(R (*)(A, B));
template <class F, class R, class A, class B>
Parameters<A, B> parameters_of(R (F::*)(A, B));
template <class F, class R, class A, class B>
Parameters<A, B> parameters_of(R (F::*)(A, B) const);

/// Returns the Parameters of a function pointer or a function object; tensors for others, such as generic lambdas.
template <class F>
auto find_parameters() {
  if constexpr (requires { loss_detail::parameters_of(std::declval<F>()); }) {
    return decltype(loss_detail::parameters_of(std::declval<F>()))();
  } else if constexpr (requires { loss_detail::parameters_of(&F::operator()); }) {
    return decltype(loss_detail::parameters_of(&F::operator()))();
  } else {
    return Parameters<at::Tensor, at::Tensor>();
  }
}

}  // namespace loss_detail

/// Makes a Loss from a function of the types of the last layer's result and the target.
template <class Output, class Target = at::Tensor, class F>
Loss loss_of(F function) {
  return [function = std::move(function)](const Batch& output, const Batch& target) {
    return function(BatchOf<Output>::to(output), BatchOf<Target>::to(target));
  };
}
/// Makes a Loss from a function of two tensors. A parameter of type Batch gets the whole result or target, which may
/// have several members. A generic lambda gets tensors, and needs `-> at::Tensor`.
template <class F>
Loss loss_of(F function) {
  using Found = decltype(loss_detail::find_parameters<F>());
  return loss_of<typename Found::Output, typename Found::Target>(std::move(function));
}

/// Report of one step, over all workers of this replica.
struct StepReport {
  std::uint64_t step = 0;  ///< counts the pipeline's steps of all kinds from its creation
  int micro_batches = 0;
  /// Planned schedule; empty for Schedule::kArrival.
  schedule::Table table;
  /// Executed actions and their times, by worker of the plan; a stage here is a layer range of the plan.
  /// Peaks count micro-batches with live activations, summed over the worker's layer ranges.
  schedule::Timeline measured;
};

/// What the layers of a pipeline keep between calls of Pipeline::infer(input, cache), such as the keys and values of
/// attention when a model generates text token by token. Every worker has one and passes it to the same calls; it holds
/// this worker's part only. Belongs to the pipeline of its first call, whose rows all later calls have. If a call
/// fails, the cache is as before it. May outlive its pipeline; frees what it holds when it is destroyed.
class Cache {
 public:
  Cache();
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  class State;
  State& state() { return *state_; }

 private:
  const std::unique_ptr<State> state_;
};

/// Splits each batch into micro-batches and runs them through the layers' owners. Results and gradients
/// equal those of the plain model on each micro-batch, up to the order of floating-point sums. Every worker
/// of the plan creates it and calls the same functions in the same order, from its training thread. A stage
/// that fails, dies or stalls ends the step on all workers with the same Error, which names it; gradients
/// are then incomplete, and the next step works unless a worker died. With one worker it is a plain loop.
/// With replicas, all workers of all replicas call the same functions; each replica passes its own batch.
class Pipeline {
 public:
  /// Collective over the plan's workers. Builds the layers that this worker owns. Throws on all workers,
  /// naming the difference, if layers or options differ.
  Pipeline(const Worker& worker, const Layers& layers, PipelineOptions options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Runs forward, loss and backward of one batch; gradients accumulate in `.grad`. Only the worker of the
  /// first use reads `input`, only that of the last use reads `target`; elsewhere they may be empty.
  /// Tensors are split along the first dimension. Returns the loss, the mean over the batch's rows, on
  /// every worker. With gradients disabled on the first worker it computes only the loss. With staleness 1, gradients
  /// and loss are those of the previous call, and the first call returns NaN.
  double train_step(const Batch& input, const Batch& target, const Loss& loss,
                    const StepOptions& options = {});
  /// For a loss of two tensors or batches: see loss_of().
  template <class F>
  requires std::is_invocable_r_v<at::Tensor, F, at::Tensor, at::Tensor>
  double train_step(const Batch& input, const Batch& target, F loss, const StepOptions& options = {}) {
    return train_step(input, target, loss_of(std::move(loss)), options);
  }

  /// With staleness 1: ends the last batch as the next train_step() would, without beginning another one; returns its
  /// loss, or NaN if none is in flight. Before infer(), forward() and checkpoints. Called on all workers.
  double finish();
  /// With staleness 1: whether a batch has begun and not ended. It cannot be part of a checkpoint.
  bool in_flight() const;

  /// Runs the forward without gradients. Returns the whole output on the worker of the last use and an
  /// empty batch elsewhere.
  Batch infer(const Batch& input);
  /// The same for the next piece of a sequence: layers keep state in `cache` (LayerCache), which stays on their workers.
  /// All workers pass the same cache, on all replicas.
  Batch infer(const Batch& input, Cache& cache);

  /// Runs the forward and keeps what backward() needs. Returns the whole output, as leaves that require
  /// gradients, on the worker of the last use and an empty batch elsewhere. Any next call but backward()
  /// abandons the step.
  Batch forward(const Batch& input);
  /// Runs the backward of the last forward() from the gradients of its output on the worker of the last
  /// use: `gradients`, or if empty the leaves' `.grad`.
  void backward(const std::vector<at::Tensor>& gradients = {});

  /// Sets training or evaluation mode of the layers that this worker owns.
  void train(bool on = true);
  void eval() { train(false); }
  /// Parameters of the layers that this worker owns, each once, in layer order.
  std::vector<at::Tensor> parameters() const;
  /// Names of parameters(), in their order, for an optimizer whose state any number of stages can restore:
  /// optim::ParamGroup(pipeline.parameters(), spec, pipeline.parameter_names()).
  std::vector<std::string> parameter_names() const;
  /// The layers that this worker owns, for checkpoints: "layers.<number>.<name>", so that any number of stages can
  /// restore them. Holds a reference.
  state::SourcePtr state_source();
  /// Scales the `.grad` of all workers' parameters to a total norm of at most `max_norm`; returns the norm before
  /// scaling, the same on all. Counts tied parameters once. Collective; after train_step() or backward(). Norm types
  /// as in optim::clip_grad_norm().
  double clip_grad_norm(double max_norm, double norm_type = 2);
  /// Module of a layer that this worker owns; null for other layers and for functions.
  std::shared_ptr<torch::nn::Module> module(int layer) const;

  /// The plan of this replica; the others have the same with other workers.
  const Plan& plan() const;
  /// The replica of this worker, from 0 to PipelineOptions::replicas - 1.
  int replica() const;
  /// The parameters that Layers::tie() ties.
  const std::vector<std::vector<TiedParameter>>& ties() const;
  /// Report of the last successful step.
  const StepReport& last_step() const;
  /// The number of training steps that have succeeded, from which the next one draws its random numbers (seed_of_use()).
  std::uint64_t training_steps() const;
  /// Continues the count of an earlier pipeline, as restoring a checkpoint does. Called on all workers.
  void set_training_steps(std::uint64_t steps);

  class Impl;

 private:
  const ProcessOwned<Impl> impl_;
};

}  // namespace torchspan::pipeline

namespace torchspan {
using pipeline::ActivationCheckpoint;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using pipeline::StepOptions;
}  // namespace torchspan

namespace torchspan::pipeline {

/// Splits items into consecutive, non-empty parts with the smallest maximum cost (exact, by dynamic
/// programming), then with parts as even as possible. Returns the number of items per part. Throws
/// Error{kInvalid} for negative costs or fewer items than parts.
std::vector<int> balance_costs(const std::vector<double>& costs, int parts);

/// Measured cost of a layer, over all its uses.
struct LayerCost {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double parameter_bytes = 0;
  double activation_bytes = 0;  ///< of its outputs for the sample
  double kept_bytes = 0;        ///< of what it computes and a graph keeps until the backward
};

struct ProfileOptions {
  int repeats = 3;  ///< the fastest run counts
  /// For balance_by_time() and balance_by_size(): the workers that call it; empty: all.
  std::vector<std::string> workers = {};
};

/// Builds every layer locally, once, and runs `sample`, one micro-batch, forward and backward through every
/// use. Existing modules keep their parameters, gradients, buffers and modes, and LibTorch's generator its
/// state. Throws Error{kInvalid} that names the layer to which the sample does not fit, or while LibTorch's profiler runs
/// on this thread.
std::vector<LayerCost> profile(Executor& executor, const Layers& layers, const Batch& sample,
                               const ProfileOptions& options = {});

/// Returns a balance for PipelineOptions by measured forward and backward time. Collective over
/// ProfileOptions::workers: the first one measures with its `sample`; all get the same balance, or the same
/// Error{kInvalid} if a layer does not fit the sample. The others wait at most 5 minutes.
std::vector<int> balance_by_time(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 const ProfileOptions& options = {});
/// Returns a balance by memory: activations, and parameters times `parameter_scale` (to include gradients
/// and optimizer state). Collective like balance_by_time().
std::vector<int> balance_by_size(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 double parameter_scale = 2, const ProfileOptions& options = {});

/// What measure_costs() runs.
struct CostSample {
  Batch input;  ///< one micro-batch
  Batch target;
  Loss loss;
  int repeats = 3;  ///< the fastest run counts; 1 or more
};

/// Measures what one micro-batch costs each layer range of the plan that `options` and the world of `worker` give: times,
/// and in bytes what it keeps until its input gradient, until its weight gradient, and while a forward is repeated.
/// Simulate tables of this plan with the result. Not collective: builds all layers here and needs their memory; existing
/// modules keep their parameters, gradients and buffers. ActivationCheckpoint::kExceptLast counts as kAlways. Throws
/// Error{kInvalid} if the sample does not fit, or while LibTorch's profiler runs on this thread.
std::vector<schedule::Costs> measure_costs(const Worker& worker, const Layers& layers,
                                           const PipelineOptions& options, const CostSample& sample);

}  // namespace torchspan::pipeline
