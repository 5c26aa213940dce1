#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/autograd/graph.h>
#include <torchspan/rpc/worker.h>

#include "autograd/state.h"

namespace torchspan::autograd {

/// This worker's part of a context's graph; `roots` are losses of its own.
WorkerGraph graph_of(const Worker& me, const ContextState& context, const std::vector<at::Tensor>& roots);

}  // namespace torchspan::autograd
