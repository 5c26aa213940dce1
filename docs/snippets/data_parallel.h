#pragma once
#include <torchspan/data_parallel.h>
#include <torchspan/data_parallel/sync_batch_norm.h>

#include "docs/snippets/modules.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor images);
};
TORCH_MODULE(Net);
struct Detection {
  at::Tensor boxes, scores;
};

std::vector<Batch> batches_of(std::uint32_t rank, std::uint32_t ranks);
torch::Tensor loss_of(const torch::Tensor& output);
extern Net net;
extern ts::DistributedDataParallel<Net>& model;
extern torch::optim::SGD& optimizer;
extern torch::Tensor first_half, second_half, positions, wanted;
extern std::vector<Batch> mine;
