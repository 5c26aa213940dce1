#pragma once
// SyncBatchNorm: batch norm over the batches of all ranks. Includes torch/nn.
#include <cstddef>
#include <optional>
#include <ostream>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel.h>

namespace torchspan {

/// Batch normalization whose training statistics are those of all ranks' batches together (Ioffe and
/// Szegedy, 2015); forward and backward match one process with the whole batch. Ranks may have different,
/// even zero, batch sizes, but all must run forward and backward. Inputs are [batch, features, …] of a
/// floating-point dtype; parameters, buffers and their names are those of torch::nn::BatchNorm. Without a
/// group, in a group of one, and after eval() it is a plain batch norm. No double backward:
/// Error{kUnsupported}.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options);
  /// Replaces `norm`: same options, mode and tensors.
  template <std::size_t D, class Derived>
  explicit SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Derived>& norm) : options(norm.options) {
    adopt({norm.weight, norm.bias}, {norm.running_mean, norm.running_var, norm.num_batches_tracked});
    train(norm.is_training());
  }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Throws Error{kInvalid} for an invalid shape or dtype, and on all ranks if all batches together have
  /// one value per feature or ranks differ in their number of features. Throws what the group throws.
  at::Tensor forward(const at::Tensor& input);

  /// Sets the group whose ranks' batches are normalized together. All ranks of the group must call it in
  /// the same order as their other operations on the group.
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
  /// Counts a batch; returns the momentum of the running statistics.
  double count_batch();

  std::optional<collective::Group> group_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace torchspan
