#pragma once
#include <cstdint>

#include <ATen/core/ivalue.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <torchspan/pipeline/layers.h>

namespace char_transformer {

struct ModelOptions {
  std::int64_t vocabulary = 0;
  std::int64_t width = 96;
  std::int64_t blocks = 4;
  std::int64_t heads = 4;
  std::int64_t context = 64;
  double dropout = 0.1;
  bool tied = false;  ///< the output uses the embedding's matrix
  bool copies =
      false;  ///< of a tied matrix: the head has a copy, so that no activations travel to the embedding
  std::uint64_t seed = 1;
  c10::Device device = c10::kCPU;  ///< of this worker's layers
};

/// Maps characters [rows, context] to vectors [rows, context, width]; project() maps vectors back to a score
/// for each character. The layers take tensors on any device. With a cache, the characters follow those of earlier calls.
struct EmbeddingImpl : torch::nn::Module {
  explicit EmbeddingImpl(const ModelOptions& options);
  at::Tensor forward(const at::Tensor& characters, torchspan::pipeline::LayerCache& cache);
  at::Tensor project(const at::Tensor& vectors);

  torch::nn::Embedding characters{nullptr};
  torch::nn::Embedding places{nullptr};
};
TORCH_MODULE(Embedding);

/// Causal self-attention and a two-layer network, each after a layer norm and with a residual connection
/// (Radford et al., 2019). A cache keeps keys and values.
struct BlockImpl : torch::nn::Module {
  BlockImpl(const ModelOptions& options, std::int64_t number);
  at::Tensor forward(at::Tensor x, torchspan::pipeline::LayerCache& cache);

  std::int64_t heads;
  double dropout;
  torch::nn::LayerNorm before_attention{nullptr}, before_network{nullptr};
  torch::nn::Linear attention{nullptr}, merged{nullptr}, up{nullptr}, down{nullptr};

 private:
  at::Tensor attend(const at::Tensor& x, torchspan::pipeline::LayerCache& cache);
};
TORCH_MODULE(Block);

/// The last layer norm, and the output layer unless the embedding's matrix replaces it.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const ModelOptions& options);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear scores{nullptr};  ///< empty if the embedding computes the scores
};
TORCH_MODULE(Head);

/// Embedding, blocks, head, and, if tied without copies, the embedding again as the output layer.
torchspan::Layers layers(const ModelOptions& options);
/// Returns the number of layers of each stage; the blocks are distributed evenly.
std::vector<int> balance(const ModelOptions& options, int stages);

/// Cross entropy of the scores, averaged over all characters.
at::Tensor loss(const at::Tensor& scores, const at::Tensor& next);

}  // namespace char_transformer
