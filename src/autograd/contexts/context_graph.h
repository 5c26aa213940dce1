#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/autograd/graph.h>
#include <torchspan/rpc/worker.h>

#include "autograd/contexts/context_state.h"

namespace torchspan::autograd {

/// This worker's part of a context's graph, with the graphs of `roots`, losses on this worker.
WorkerGraph graph_of(const Worker& me, const ContextState& context, const std::vector<at::Tensor>& roots);

}  // namespace torchspan::autograd
