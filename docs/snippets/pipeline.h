#pragma once
#include <chrono>
#include <cstdint>
#include <thread>

#include <torchspan/pipeline.h>

#include "docs/snippets/modules.h"

using namespace std::chrono_literals;

struct EmbeddingImpl : torch::nn::Module {
  EmbeddingImpl(std::int64_t letters, std::int64_t width);
  torch::Tensor forward(torch::Tensor x);
  torch::Tensor project(torch::Tensor x);
};
TORCH_MODULE(Embedding);
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width);
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Block);
struct ParallelBlockImpl : torch::nn::Module {
  ParallelBlockImpl(std::int64_t width, const torchspan::Group& group);
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(ParallelBlock);
torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target);
extern torchspan::Pipeline& pipeline;
extern torch::Tensor tokens, mask, labels;
torchspan::Layers make_layers();
void train_step(torchspan::Pipeline& pipe, torchspan::optim::Optimizer& optimizer, std::int64_t step);
