#pragma once
#include <memory>

#include "bench/rpc/side.h"

namespace torchspan::bench {

/// Whether the LibTorch of this build has its own RPC.
bool has_torch_rpc();

/// Joins with LibTorch's TensorPipe agent, driven from C++ with built-in operators, its cheapest path. It
/// serves immediately, with its default number of threads, and uses only TCP for Way::kHosts. leave() does
/// not wait for the other processes; kill them. Throws if this LibTorch has no RPC.
std::unique_ptr<Side> join_torch_rpc(const WorkerPlace& place);

}  // namespace torchspan::bench
