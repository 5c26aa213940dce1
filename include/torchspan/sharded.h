#pragma once
// Data-parallel training with divided state: ZeroRedundancyOptimizer and FullyShardedDataParallel. Layers
// whose parts lie on several ranks, which need modules of torch/nn, are in sharded/tensor_parallel.h.
#include <torchspan/sharded/fully_sharded_data_parallel.h>
#include <torchspan/sharded/functional.h>
#include <torchspan/sharded/zero_redundancy_optimizer.h>
