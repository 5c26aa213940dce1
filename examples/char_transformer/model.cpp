#include "char_transformer/model.h"

#include <cmath>
#include <limits>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/dropout.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace char_transformer {
namespace {

namespace F = torch::nn::functional;

/// Seeds a layer's weights by the seed and the layer's number, so that they do not depend on the worker.
void seed_layer(const ModelOptions& options, std::int64_t number) {
  torch::manual_seed(options.seed * 1000 + static_cast<std::uint64_t>(number));
}

/// Makes the weights small and moves the layer to its device.
void finish_layer(torch::nn::Module& module, c10::Device device) {
  for (const auto& parameter : module.named_parameters()) {
    if (parameter.value().dim() > 1) torch::nn::init::normal_(parameter.value(), 0, 0.05);
  }
  module.to(device);
}

}  // namespace

EmbeddingImpl::EmbeddingImpl(const ModelOptions& options) {
  seed_layer(options, 0);
  characters = register_module("characters", torch::nn::Embedding(options.vocabulary, options.width));
  places = register_module("places", torch::nn::Embedding(options.context, options.width));
  finish_layer(*this, options.device);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& rows, torchspan::pipeline::LayerCache& cache) {
  const auto device = characters->weight.device();
  std::int64_t before = 0;
  if (cache.active()) {
    if (!cache.tensors().empty()) before = cache.tensors()[0].item<std::int64_t>();
    cache.tensors() = {torch::tensor(before + rows.size(1), torch::kLong)};
  }
  return characters(rows.to(device)) +
         places(torch::arange(before, before + rows.size(1), at::device(device).dtype(torch::kLong)));
}

at::Tensor EmbeddingImpl::project(const at::Tensor& vectors) {
  return torch::matmul(vectors.to(characters->weight.device()), characters->weight.t());
}

BlockImpl::BlockImpl(const ModelOptions& options, std::int64_t number)
    : heads(options.heads), dropout(options.dropout) {
  seed_layer(options, number);
  const std::int64_t width = options.width;
  before_attention =
      register_module("before_attention", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  before_network =
      register_module("before_network", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  attention = register_module("attention", torch::nn::Linear(width, 3 * width));
  merged = register_module("merged", torch::nn::Linear(width, width));
  up = register_module("up", torch::nn::Linear(width, 4 * width));
  down = register_module("down", torch::nn::Linear(4 * width, width));
  finish_layer(*this, options.device);
}

at::Tensor BlockImpl::attend(const at::Tensor& x, torchspan::pipeline::LayerCache& cache) {
  const std::int64_t rows = x.size(0), length = x.size(1), width = x.size(2);
  // [3, rows, heads, length, width / heads]
  const auto parts = attention(x).view({rows, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
  at::Tensor keys = parts[1], values = parts[2];
  if (cache.active()) {
    if (!cache.tensors().empty()) {
      keys = torch::cat({cache.tensors()[0], keys}, 2);
      values = torch::cat({cache.tensors()[1], values}, 2);
    }
    cache.tensors() = {keys, values};
  }
  at::Tensor scores = torch::matmul(parts[0], keys.transpose(-2, -1)) /
                      std::sqrt(static_cast<double>(width) / static_cast<double>(heads));
  const std::int64_t all = keys.size(2);
  const auto later =
      torch::ones({length, all}, at::device(x.device()).dtype(torch::kBool)).triu(all - length + 1);
  scores = scores.masked_fill(later, -std::numeric_limits<float>::infinity());
  const at::Tensor seen = torch::matmul(scores.softmax(-1), values);
  return merged(seen.transpose(1, 2).reshape({rows, length, width}));
}

at::Tensor BlockImpl::forward(at::Tensor x, torchspan::pipeline::LayerCache& cache) {
  x = x.to(up->weight.device());
  const auto thin = [&](const at::Tensor& y) { return torch::dropout(y, dropout, is_training()); };
  x = x + thin(attend(before_attention(x), cache));
  return x + thin(down(torch::gelu(up(before_network(x)))));
}

HeadImpl::HeadImpl(const ModelOptions& options) {
  seed_layer(options, 999);
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
  if (!options.tied || options.copies) {
    const auto made = torch::nn::LinearOptions(options.width, options.vocabulary).bias(!options.tied);
    scores = register_module("scores", torch::nn::Linear(made));
  }
  finish_layer(*this, options.device);
}

at::Tensor HeadImpl::forward(const at::Tensor& x) {
  const at::Tensor y = norm(x.to(norm->weight.device()));
  return scores ? scores(y) : y;
}

torchspan::Layers layers(const ModelOptions& options) {
  torchspan::Layers layers;
  const auto embedding = layers.add<Embedding>(options).named("embedding");
  for (std::int64_t block = 1; block <= options.blocks; ++block) {
    layers.add<Block>(options, block).named("block" + std::to_string(block));
  }
  const auto head = layers.add<Head>(options).named("head");
  if (options.tied && options.copies) {
    layers.tie({{embedding, "characters.weight"}, {head, "scores.weight"}});
  } else if (options.tied) {
    layers.reuse(embedding, "project", &EmbeddingImpl::project);
  }
  return layers;
}

std::vector<int> balance(const ModelOptions& options, int stages) {
  std::vector<int> balance;
  for (int stage = 0; stage < stages; ++stage) {
    const auto blocks = static_cast<int>(options.blocks / stages + (stage < options.blocks % stages ? 1 : 0));
    balance.push_back(blocks + (stage == 0 ? 1 : 0) + (stage == stages - 1 ? 1 : 0));
  }
  return balance;
}

at::Tensor loss(const at::Tensor& scores, const at::Tensor& next) {
  return F::cross_entropy(scores.reshape({-1, scores.size(-1)}), next.to(scores.device()).reshape({-1}));
}

}  // namespace char_transformer
