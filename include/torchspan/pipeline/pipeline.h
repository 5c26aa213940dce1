#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/options.h>
#include <torchspan/pipeline/plan.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/schedule.h>

/// Pipeline parallelism: layers of a model on several workers, run on micro-batches.
namespace torchspan::pipeline {

/// The loss of one micro-batch: a scalar, the mean over its rows.
using Loss = std::function<at::Tensor(const Batch& output, const Batch& target)>;

/// Makes a Loss from a function of two tensors, or of the types of the last layer's result and the target.
template <class Output = at::Tensor, class Target = at::Tensor, class F>
Loss loss_of(F function) {
  return [function = std::move(function)](const Batch& output, const Batch& target) {
    return function(BatchOf<Output>::to(output), BatchOf<Target>::to(target));
  };
}

/// Report of one step, over all workers.
struct StepReport {
  std::uint64_t step = 0;
  int micro_batches = 0;
  /// Planned schedule; empty for Schedule::kArrival.
  schedule::Table table;
  /// Executed actions and their times, by worker of the plan; a stage here is a layer range of the plan.
  /// Peaks count micro-batches with live activations, summed over the worker's layer ranges.
  schedule::Timeline measured;
};

/// Splits each batch into micro-batches and runs them through the layers' owners. Results and gradients
/// equal those of the plain model on each micro-batch, up to the order of floating-point sums. Every worker
/// of the plan creates it and calls the same functions in the same order, from its training thread. A stage
/// that fails, dies or stalls ends the step on all workers with the same Error, which names it; gradients
/// are then incomplete, and the next step works unless a worker died. With one worker it is a plain loop.
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
  /// every worker. With gradients disabled on the first worker it computes only the loss.
  double train_step(const Batch& input, const Batch& target, const Loss& loss,
                    const StepOptions& options = {});
  /// For a loss of two tensors.
  template <class F>
  requires std::is_invocable_r_v<at::Tensor, F, at::Tensor, at::Tensor>
  double train_step(const Batch& input, const Batch& target, F loss, const StepOptions& options = {}) {
    return train_step(input, target, loss_of(std::move(loss)), options);
  }

  /// Runs the forward without gradients. Returns the whole output on the worker of the last use and an
  /// empty batch elsewhere.
  Batch infer(const Batch& input);

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
  /// Module of a layer that this worker owns; null for other layers and for functions.
  std::shared_ptr<torch::nn::Module> module(int layer) const;

  const Plan& plan() const;
  /// Report of the last successful step.
  const StepReport& last_step() const;

  class Impl;

 private:
  const std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::pipeline
