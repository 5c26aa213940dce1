#include "rpc/agent/agent_state.h"

#include <utility>

namespace torchspan::rpc {
namespace {

PoolOptions pool_options(const ServiceOptions& options) {
  PoolOptions pool;
  pool.name = options.name;
  pool.threads = options.threads;
  pool.max_threads = options.max_threads;
  return pool;
}

}  // namespace

AgentState::AgentState(std::shared_ptr<Runtime> shared_runtime, FunctionTable table, ServiceOptions service)
    : runtime_owner(std::move(shared_runtime)),
      runtime(*runtime_owner),
      functions(std::move(table)),
      options(std::move(service)),
      devices({options.name, options.rank}, options.device_maps),
      self{options.name, options.rank},
      peers(Peer{self, {}, 0, 0}),
      host(make_process_shared<Host>(runtime_owner, pool_options(options))),
      calls(options.max_pending_calls),
      serving(options.max_waiting_bytes) {
  devices.check_here();
}

}  // namespace torchspan::rpc
