#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torchspan/core/error.h>

#include "autograd/nodes/nodes.h"
#include "engine/api/graph_pass.h"

namespace torchspan::autograd {

/// A failure on `worker` as the other workers of the pass see it: kInvalid here becomes kRemoteFailure there.
Error as_remote(const Error& failure, const std::string& worker);
/// `cause` with the name of `worker`, unless its message has it.
Error located(const Error& cause, const std::string& worker);
/// The failure of a node of `graph` on `worker`: names the node, and the calls among those of `sends` whose
/// results or arguments were computed from it.
Error node_failure(const engine::GraphPass& graph, const std::string& worker,
                   const std::vector<SendNodePtr>& sends);

/// A worker that cannot be reached in a pass.
struct LostWorker {
  std::string name;
  std::uint32_t rank = 0;
  std::string through = {};          ///< whose gradients could not be sent; empty: another message
  std::set<std::string> calls = {};  ///< between it and this worker
};
/// The failure on `worker` when `lost` is gone, or cannot be reached because of `cause`.
Error lost_worker_failure(const LostWorker& lost, const Error& cause, const std::string& worker);

}  // namespace torchspan::autograd
