#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/rpc/worker.h>

namespace torchspan::autograd {

/// The part of one worker in a backward pass that has not ended.
struct RunningPass {
  std::uint64_t id = 0;
  bool busy = false;                    ///< the worker runs nodes of the graph
  std::vector<std::string> waits = {};  ///< a line for each tensor that was sent and has no gradient yet
};

/// Returns the passes in which `worker` takes part. Thread-safe; asks no other worker.
std::vector<RunningPass> running_passes(const Worker& worker);

}  // namespace torchspan::autograd
