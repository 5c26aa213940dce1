#pragma once
// RPC: Worker, RRef, functions, futures, coroutines, remote modules, errors. Includes no torch/nn.
#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/core/task.h>
#include <torchspan/rpc/batcher.h>
#include <torchspan/rpc/remote_module.h>
#include <torchspan/rpc/worker.h>
