#pragma once
// DeferredBatchNorm: batch norm over all micro-batches of a step. Includes torch/nn.
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

namespace torchspan::pipeline {

/// Interface of a module that gathers statistics over micro-batches; called by the pipeline.
class StepStatistics {
 public:
  virtual ~StepStatistics() = default;
  /// The next forward is this use of the layer; `repeated` if it is recomputed for a backward.
  virtual void begin_use(int order, bool repeated) = 0;
  /// Ends the step: commits the gathered statistics, or discards them if it failed.
  virtual void end_step(bool succeeded) = 0;
  /// What this step has gathered so far, for the other replicas of the pipeline.
  virtual std::vector<at::Tensor> gathered() const { return {}; }
  /// Replaces what this step has gathered by the union of what all replicas have gathered, in their order.
  virtual void set_gathered(const std::vector<std::vector<at::Tensor>>& by_replica) {
    static_cast<void>(by_replica);
  }
};

/// Batch normalization for micro-batches. Normalizes each micro-batch with its own statistics, as BatchNorm
/// does, but updates the running statistics once per step with those of the whole batch (mean and unbiased
/// variance, merged in double precision after Chan et al.), for each use of its layer in order. Inputs have
/// 2 to 5 dimensions, channels second. Outside a pipeline every forward is a step. State names are
/// BatchNorm's.
class DeferredBatchNormImpl : public torch::nn::Cloneable<DeferredBatchNormImpl>, public StepStatistics {
 public:
  explicit DeferredBatchNormImpl(std::int64_t channels)
      : DeferredBatchNormImpl(torch::nn::BatchNormOptions(channels)) {}
  explicit DeferredBatchNormImpl(torch::nn::BatchNormOptions options);
  /// Parameters and running statistics shared with another module.
  struct State {
    at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  };
  DeferredBatchNormImpl(const torch::nn::BatchNormOptions& options, const State& state);

  void reset() override;
  at::Tensor forward(const at::Tensor& input);
  void begin_use(int order, bool repeated) override;
  void end_step(bool succeeded) override;
  /// For each use, in order: its number, the count, the mean and the squared spread.
  std::vector<at::Tensor> gathered() const override;
  void set_gathered(const std::vector<std::vector<at::Tensor>>& by_replica) override;

  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  struct Moments {
    double count = 0;
    at::Tensor mean;            ///< double precision
    at::Tensor squared_spread;  ///< sum of squared distances from the mean
  };
  void gather(const at::Tensor& input);
  void merge(int order, const Moments& more);
  void commit(const Moments& moments);

  int order_ = -1;  ///< -1: outside a pipeline
  bool repeated_ = false;
  std::map<int, Moments> gathered_;  ///< by order
};
TORCH_MODULE(DeferredBatchNorm);

/// Returns a module that shares the parameters and running statistics of a batch norm; frozen parameters
/// stay frozen.
template <class Holder>
DeferredBatchNorm convert_deferred_batch_norm(const Holder& norm) {
  DeferredBatchNorm converted(std::make_shared<DeferredBatchNormImpl>(
      norm->options, DeferredBatchNormImpl::State{norm->weight, norm->bias, norm->running_mean,
                                                  norm->running_var, norm->num_batches_tracked}));
  converted->train(norm->is_training());
  return converted;
}

/// Returns the same modules in the same order with every batch norm converted. Throws Error{kInvalid} for
/// one inside another module, whose class must declare a DeferredBatchNorm member instead.
torch::nn::Sequential convert_deferred_batch_norm(const torch::nn::Sequential& modules);

}  // namespace torchspan::pipeline

namespace torchspan {
using pipeline::DeferredBatchNorm;
}  // namespace torchspan
