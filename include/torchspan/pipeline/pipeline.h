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
#include <torchspan/schedule/schedule.h>

/// A model's layers spread over workers, micro-batches flowing through them.
namespace torchspan::pipeline {

/// The loss of one micro-batch: a scalar, the mean over its rows.
using Loss = std::function<at::Tensor(const Batch& output, const Batch& target)>;

/// A Loss from a function of two tensors, or of whatever the last layer returns and the target is.
template <class Output = at::Tensor, class Target = at::Tensor, class F>
Loss loss_of(F function) {
  return [function = std::move(function)](const Batch& output, const Batch& target) {
    return function(BatchOf<Output>::to(output), BatchOf<Target>::to(target));
  };
}

/// How a step went, over all workers.
struct StepReport {
  std::uint64_t step = 0;
  int micro_batches = 0;
  /// What the schedule planned; empty under Schedule::kArrival.
  schedule::Table table;
  /// What was run and when, by worker of the plan; stages are segments of the plan. Peaks count the segments'
  /// micro-batches whose activations were alive.
  schedule::Timeline measured;
};

/// Splits each batch into micro-batches and drives them through the layers' owners. Results and gradients
/// equal those of the plain model on the micro-batches one by one, up to the order of floating-point sums.
/// Every worker of the plan makes it and then calls the same functions in the same order, from the thread
/// that trains. A stage that fails, dies or stalls ends the step on all workers with one Error that names it;
/// after a failure gradients are incomplete, and the next step works unless a worker died. One worker is a
/// plain loop.
class Pipeline {
 public:
  /// Collective over the plan's workers: throws on all of them, naming the difference, unless they have equal
  /// layers and options. Builds the layers that this worker owns.
  Pipeline(const Worker& worker, const Layers& layers, PipelineOptions options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Forward, loss and backward of one batch; gradients add up in the parameters' `.grad`. `input` is used on
  /// the worker of the first use, `target` on that of the last; elsewhere they may be empty. All tensors are
  /// split along their first dimension. Returns the loss, the mean over the batch's rows, on every worker.
  /// Where gradients are switched off on the first worker, only the loss is computed.
  double train_step(const Batch& input, const Batch& target, const Loss& loss,
                    const StepOptions& options = {});
  /// For losses of two tensors.
  template <class F>
  requires std::is_invocable_r_v<at::Tensor, F, at::Tensor, at::Tensor>
  double train_step(const Batch& input, const Batch& target, F loss, const StepOptions& options = {}) {
    return train_step(input, target, loss_of(std::move(loss)), options);
  }

  /// Forward only, without gradients: the whole output on the worker of the last use, an empty batch
  /// elsewhere.
  Batch infer(const Batch& input);

  /// Forward that keeps what a backward needs: the whole output on the worker of the last use, as leaves that
  /// require gradients; an empty batch elsewhere. Whoever does not call backward() next gives the step up.
  Batch forward(const Batch& input);
  /// The backward of the last forward(), from the gradients of its output (its leaves' `.grad`, unless
  /// `gradients` has them) on the worker of the last use.
  void backward(const std::vector<at::Tensor>& gradients = {});

  /// Training or evaluation mode of the layers that this worker owns.
  void train(bool on = true);
  void eval() { train(false); }
  /// The parameters of the layers that this worker owns, each once, in the order of the layers.
  std::vector<at::Tensor> parameters() const;
  /// The module of a layer that this worker owns; null for others and for functions.
  std::shared_ptr<torch::nn::Module> module(int layer) const;

  const Plan& plan() const;
  /// The last step that succeeded.
  const StepReport& last_step() const;

  class Impl;

 private:
  const std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::pipeline
