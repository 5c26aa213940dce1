#pragma once
#include <cstddef>
#include <optional>
#include <ostream>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <torchspan/collective/group.h>
#include <torchspan/data_parallel/convert_sync_batch_norm.h>

namespace torchspan {

/// Batch normalization whose mean and variance, while it trains, are those of the batches of all ranks
/// together (Ioffe and Szegedy 2015): every rank gets what one process with the whole batch would, forward
/// and backward. Ranks may have batches of different sizes, also empty ones, but all of them go through
/// forward and backward. For inputs [batch, features, …] of a floating dtype; parameters, buffers and their
/// names are those of torch::nn::BatchNorm. Without a group, in a group of one, and after eval() it is an
/// ordinary batch norm and sends nothing. No second derivatives: Error{kUnsupported}.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options);
  /// Takes the place of `norm`: the same options and mode, the same tensors.
  template <std::size_t D, class Derived>
  explicit SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Derived>& norm) : options(norm.options) {
    adopt({norm.weight, norm.bias}, {norm.running_mean, norm.running_var, norm.num_batches_tracked});
    train(norm.is_training());
  }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Throws Error{kInvalid} for shapes and dtypes that make no sense; and on all ranks when all batches
  /// together have one value a feature, or ranks differ in their features. What a group throws, it throws.
  at::Tensor forward(const at::Tensor& input);

  /// Whose batches are one from now on. All ranks of the group do the same, in the same order as their other
  /// operations on it, and let go of the module before the group's session.
  void set_group(collective::Group group) { group_ = std::move(group); }
  const std::optional<collective::Group>& group() const { return group_; }

  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias;                                    ///< undefined unless options.affine()
  at::Tensor running_mean, running_var, num_batches_tracked;  ///< only if options.track_running_stats()

 private:
  struct Parameters {
    at::Tensor weight, bias;
  };
  struct Buffers {
    at::Tensor mean, var, batches;
  };
  void adopt(const Parameters& parameters, const Buffers& buffers);
  void check(const at::Tensor& input) const;
  bool synchronizes() const { return is_training() && group_ && group_->size() > 1; }
  /// Counts a batch; the weight of its statistics in the running ones.
  double count_batch();

  std::optional<collective::Group> group_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace torchspan
