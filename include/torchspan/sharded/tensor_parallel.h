#pragma once
// Linear layers, embeddings and norms whose parts lie on several ranks. Includes torch/nn.
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <torchspan/collective.h>
#include <torchspan/state/source.h>

namespace torchspan {
namespace optim {
class Optimizer;
}

/// This rank's part of a parameter: rows or columns from `first` on, along dimension `dim`.
struct ParameterPart {
  std::string name;                 ///< in its module
  std::vector<std::int64_t> shape;  ///< of the whole parameter
  std::int64_t dim = 0;
  std::int64_t first = 0;
};

/// A module that has parts of parameters. Checkpoints, clipping, GradScaler and FullyShardedDataParallel find them.
class TensorParallelModule : public torch::nn::Module {
 public:
  /// Parameters that are not listed are whole, with the same values on all ranks.
  const std::vector<ParameterPart>& parts() const { return parts_; }
  const collective::Group& group() const { return group_; }

 protected:
  TensorParallelModule(std::string name, collective::Group group);
  /// Registers this rank's part of a parameter, whose whole has `size` elements along `dim`; `first`: where it begins.
  at::Tensor& register_part(std::string name, at::Tensor part, std::int64_t dim, std::int64_t first,
                            std::int64_t size);

 private:
  const collective::Group group_;
  std::vector<ParameterPart> parts_;
};

struct ColumnParallelOptions {
  bool gather_output = false;  ///< the output is whole; else its last dimension is this rank's part
  /// Sequence parallelism: the input is this rank's part along this dimension, and is gathered.
  std::optional<std::int64_t> sequence_dim = std::nullopt;
};

/// A linear layer whose output features are split evenly among the ranks of a group. All ranks construct it at
/// the same time; the group's rank 0 gives the values. Throws Error{kInvalid} if the features cannot be split.
class ColumnParallelLinearImpl : public TensorParallelModule {
 public:
  ColumnParallelLinearImpl(std::int64_t in, std::int64_t out, collective::Group group,
                           ColumnParallelOptions options = {});
  /// From an existing layer, which it does not keep.
  ColumnParallelLinearImpl(const torch::nn::Linear& whole, collective::Group group,
                           ColumnParallelOptions options = {});
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  ///< [out / ranks, in]
  at::Tensor bias;    ///< [out / ranks]; undefined if there is no bias

 private:
  const ColumnParallelOptions options_;
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelOptions {
  bool input_is_part = true;  ///< the input's last dimension is this rank's part, as of ColumnParallelLinear
  /// Sequence parallelism: the output is this rank's part along this dimension.
  std::optional<std::int64_t> sequence_dim = std::nullopt;
};

/// A linear layer whose input features are split evenly among the ranks, which sum their outputs. Otherwise like
/// ColumnParallelLinear.
class RowParallelLinearImpl : public TensorParallelModule {
 public:
  RowParallelLinearImpl(std::int64_t in, std::int64_t out, collective::Group group,
                        RowParallelOptions options = {});
  RowParallelLinearImpl(const torch::nn::Linear& whole, collective::Group group,
                        RowParallelOptions options = {});
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  ///< [out, in / ranks]
  at::Tensor bias;    ///< [out], whole; undefined if there is no bias

 private:
  const RowParallelOptions options_;
};
TORCH_MODULE(RowParallelLinear);

/// An embedding whose rows are split among the ranks, evenly but for one row. Takes the same indices on all ranks,
/// returns whole rows. Without padding_idx, max_norm and sparse gradients.
class VocabularyParallelEmbeddingImpl : public TensorParallelModule {
 public:
  VocabularyParallelEmbeddingImpl(std::int64_t rows, std::int64_t width, collective::Group group);
  VocabularyParallelEmbeddingImpl(const torch::nn::Embedding& whole, collective::Group group);
  /// Throws Error{kInvalid} for an index out of range; on a device, this check waits for the device.
  at::Tensor forward(const at::Tensor& indices);
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  ///< [this rank's rows, width]

 private:
  std::int64_t rows_ = 0, first_ = 0;
};
TORCH_MODULE(VocabularyParallelEmbedding);

/// A layer normalization of parts of a sequence: its parameters are whole, and their gradients are summed over the
/// ranks.
class SequenceParallelLayerNormImpl : public TensorParallelModule {
 public:
  SequenceParallelLayerNormImpl(const torch::nn::LayerNormOptions& options, collective::Group group);
  at::Tensor forward(const at::Tensor& part);
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight, bias;  ///< undefined unless options.elementwise_affine()

 private:
  const torch::nn::LayerNormOptions options_;
};
TORCH_MODULE(SequenceParallelLayerNorm);

[[deprecated("checkpoint::source_of() and CheckpointManager::add() do the same")]] inline state::SourcePtr
tensor_parallel_source(std::shared_ptr<torch::nn::Module> module) {
  return state::module_source(std::move(module));
}
template <class Optimizer>
[[deprecated("checkpoint::source_of() and CheckpointManager::add() do the same")]] state::SourcePtr
tensor_parallel_optimizer_source(Optimizer& optimizer, const torch::nn::Module&) {
  return optimizer.state_source();
}

}  // namespace torchspan
