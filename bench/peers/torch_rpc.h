#pragma once
#include <memory>

#include "bench/rpc/side.h"

namespace torchspan::bench {

/// Whether the LibTorch of this build has its own RPC.
bool has_torch_rpc();

/// Joins as LibTorch's TensorPipe agent, driven from C++ with built-in operators, which is the least it can
/// do. It serves from now on, with its default number of threads; on the way between hosts it is left with
/// TCP. leave() does not wait for the others: end the processes. Throws when this LibTorch has no RPC.
std::unique_ptr<Side> join_torch_rpc(const WorkerPlace& place);

}  // namespace torchspan::bench
