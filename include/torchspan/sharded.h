#pragma once
// Data-parallel training with divided state: ZeroRedundancyOptimizer and FullyShardedDataParallel.
#include <torchspan/sharded/fully_sharded_data_parallel.h>
#include <torchspan/sharded/zero_redundancy_optimizer.h>
