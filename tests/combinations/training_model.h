#pragma once
// The model of the trainings, in any division.
#include <array>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn.h>

#include <torchspan/sharded.h>
#include <torchspan/sharded/tensor_parallel.h>

#include "tests/combinations/training_case.h"

namespace torchspan::combinations {

namespace nn = torch::nn;

inline at::Tensor numbers(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.83).add(seed).sin().reshape(sizes);
}

inline nn::Linear filled(std::int64_t in, std::int64_t out, double seed) {
  nn::Linear layer(in, out);
  layer->to(at::kDouble);
  const at::NoGradGuard no_grad;
  layer->weight.copy_(numbers(layer->weight.sizes(), seed) * 0.5);
  layer->bias.copy_(numbers(layer->bias.sizes(), seed + 1) * 0.5);
  return layer;
}

struct WholeMlpImpl : nn::Module {
  WholeMlpImpl(double seed, const Block& block)
      : up(register_module("up", filled(6, 8, seed))), down(register_module("down", filled(8, 6, seed + 2))) {
    if (block.frozen_bias) down->bias.requires_grad_(false);
    if (block.frozen) {
      for (at::Tensor& parameter : parameters()) parameter.requires_grad_(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(WholeMlp);

struct ParallelMlpImpl : nn::Module {
  ParallelMlpImpl(double seed, const Block& block, const collective::Group& group)
      : up(register_module("up", ColumnParallelLinear(filled(6, 8, seed), group))),
        down(register_module("down", RowParallelLinear(filled(8, 6, seed + 2), group))) {
    if (block.frozen_bias) down->bias.requires_grad_(false);
    if (block.frozen) {
      for (at::Tensor& parameter : parameters()) parameter.requires_grad_(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  ColumnParallelLinear up;
  RowParallelLinear down;
};
TORCH_MODULE(ParallelMlp);

/// One forward's input.
struct Batch {
  at::Tensor rows;
  at::Tensor words;
  std::vector<bool> skipped;  ///< blocks
};

struct NetImpl : nn::Module {
  NetImpl(const Case& one, const std::optional<collective::Group>& parts, bool units, bool sparse)
      : in(register_module("in", filled(3, 6, 20))) {
    for (std::size_t i = 0; i < one.blocks.size(); ++i) add(i, one.blocks[i], parts, units);
    if (one.embedding != 0) {
      words = register_module("words", nn::Embedding(nn::EmbeddingOptions(7, 6).sparse(sparse)));
      words->to(at::kDouble);
      const at::NoGradGuard no_grad;
      words->weight.copy_(numbers({7, 6}, 77));
    }
    out = register_module("out", filled(6, 1, 30));
    if (one.own) own = register_parameter("own", numbers({3}, 40));
    if (one.buffer != 0) seen = register_buffer("seen", at::zeros({2}, at::kDouble));
  }
  at::Tensor forward(const Batch& batch) {
    if (throws) throw std::runtime_error(kThrown);
    at::Tensor x = in(batch.rows.to(in->weight.scalar_type()));
    if (words) x = x + words(batch.words);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (!batch.skipped[i]) x = blocks[i](x);
    }
    x = out(x);
    if (own.defined()) x = x + own.sum();
    if (seen.defined()) {
      const at::NoGradGuard no_grad;
      seen.mul_(0.5).add_(batch.rows.detach().mean());
    }
    return seen.defined() ? x + seen.sum() : x;
  }
  nn::Linear in, out{nullptr};
  nn::Embedding words{nullptr};
  at::Tensor own, seen;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> blocks;
  bool throws = false;

 private:
  template <class Holder>
  void push(std::size_t i, const Holder& holder) {
    modules_.push_back(holder.ptr());
    register_module("block" + std::to_string(i), holder.ptr());
    blocks.push_back([module = holder.ptr()](const at::Tensor& x) { return module->forward(x); });
  }
  void add(std::size_t i, const Block& block, const std::optional<collective::Group>& parts, bool units) {
    const double seed = 10.0 * static_cast<double>(i);
    if (block.tied != 0) {
      if (block.tied == 2) register_module("block" + std::to_string(i), modules_[0]);
      blocks.push_back(blocks[0]);
    } else if (parts) {
      units&& block.unit ? push(i, Sharded<ParallelMlp>(seed, block, *parts))
                         : push(i, ParallelMlp(seed, block, *parts));
    } else {
      units&& block.unit ? push(i, Sharded<WholeMlp>(seed, block)) : push(i, WholeMlp(seed, block));
    }
  }
  std::vector<std::shared_ptr<nn::Module>> modules_;
};
TORCH_MODULE(Net);

/// The parameters that the main optimizer trains, each once, and their names: in one group, or weights and the others.
struct NamedParameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
};
inline std::vector<NamedParameters> groups_of(const Case& one, const nn::Module& net) {
  std::vector<NamedParameters> groups(one.groups ? 2 : 1);
  std::vector<const void*> known;
  for (const auto& item : net.named_parameters()) {
    const void* identity = item.value().unsafeGetTensorImpl();
    if (item.key() == "own" || std::find(known.begin(), known.end(), identity) != known.end()) continue;
    known.push_back(identity);
    NamedParameters& group = groups[one.groups && item.key().find("weight") == std::string::npos ? 1 : 0];
    group.names.push_back(item.key());
    group.tensors.push_back(item.value());
  }
  return groups;
}

/// `step` counts over phases.
inline Batch batch_of(const Case& one, int rank, int step, int pass) {
  Batch batch;
  const double seed = 1.7 * rank + 0.9 * step + 0.31 * pass;
  batch.rows = numbers({4, 3}, seed);
  batch.words = (at::arange(4, at::kLong) * (1 + rank) + step + pass).remainder(7);
  for (std::size_t block = 0; block < one.blocks.size(); ++block)
    batch.skipped.push_back(one.skipped(block, rank, step, pass));
  return batch;
}
inline Batch second_of(const Batch& first) { return {first.rows * 0.5, first.words, first.skipped}; }
/// Its gradient is bounded, so that no training diverges.
inline at::Tensor loss_of(const at::Tensor& output) { return (output - 0.3).pow(2).log1p().mean(); }

}  // namespace torchspan::combinations
