#pragma once
// What most programs need. Not elastic.h, engine/operator_trace.h and core/preemption.h, and not the headers with
// torch/nn, which take long to compile: sharded.h, sharded/tensor_parallel.h, data_parallel/sync_batch_norm.h and
// pipeline/deferred_batch_norm.h. Includes no torch/nn.
#include <torchspan/autograd.h>
#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/core/observation.h>
#include <torchspan/data.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/pipeline.h>
#include <torchspan/rpc.h>
#include <torchspan/session.h>
#include <torchspan/wire.h>
