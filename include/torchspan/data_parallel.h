#pragma once
// DistributedDataParallel, its reducer and its hooks; local SGD. SyncBatchNorm, which needs torch/nn.h, is in
// data_parallel/sync_batch_norm.h.
#include <torchspan/data_parallel/convert_sync_batch_norm.h>
#include <torchspan/data_parallel/distributed_data_parallel.h>
#include <torchspan/data_parallel/hooks.h>
#include <torchspan/data_parallel/local_sgd.h>
#include <torchspan/data_parallel/reducer.h>
