#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torchspan/core/error.h>

#include "autograd/nodes.h"
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

/// The failure on `worker` when the worker `lost` is gone, or cannot be reached because of `cause`. `through`: the call
/// whose gradients could not be sent; empty: another message. `calls`: those between the two workers.
Error departed_worker_failure(const std::string& lost, std::uint32_t rank, const Error& cause,
                              const std::string& worker, const std::string& through,
                              std::set<std::string> calls);

}  // namespace torchspan::autograd
