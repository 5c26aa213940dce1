#pragma once
#include <torchspan/autograd.h>
#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "docs/snippets/modules.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor images);
};
TORCH_MODULE(Net);

extern ts::CheckpointManager& manager;
extern ts::DistributedDataParallel<Net>& ddp;
extern ts::ZeroRedundancyOptimizer& zero;
extern ts::FullyShardedDataParallel<Net>& fully_sharded;
extern ts::optim::Optimizer& optimizer;
extern torch::Tensor loss;
