#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/device/copies.h>
#include <torchspan/detail/rpc/service.h>

#include "rpc/agent/transport_loop.h"
#include "rpc/calls/call_table.h"
#include "rpc/calls/devices.h"
#include "rpc/calls/serving.h"
#include "rpc/device_memory/device_memory.h"
#include "rpc/peers/peer_channels.h"
#include "rpc/peers/peer_table.h"
#include "rpc/references/references.h"

namespace torchspan::rpc {

/// Runs continuations of a worker's futures on its pool, and waits for the futures. A waiter polls the
/// transport for a short time before it sleeps.
class AgentExecutor final : public ContinuationExecutor {
 public:
  AgentExecutor(std::shared_ptr<Runtime> runtime, PoolOptions options)
      : runtime_(std::move(runtime)), pool_(runtime_->executor, std::move(options)) {}
  Executor& executor() override { return pool_.executor(); }
  void post(UniqueFunction<void()> job) override;
  /// Continuations keep the environment of the thread that adds them.
  UniqueFunction<void()> bind(UniqueFunction<void()> continuation) override;
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override;
  std::string worker_name() const override { return runtime_->log.owner(); }
  /// See WorkerBackend::receive_here().
  void receive_here();
  Pool& pool() { return pool_; }
  void set_driver(std::weak_ptr<TransportLoop> driver) { driver_ = std::move(driver); }

 private:
  UniqueFunction<void()> poll_for_job(TransportLoop& driver);

  const std::shared_ptr<Runtime> runtime_;  ///< for waiters that return after the worker ended
  Pool pool_;
  std::weak_ptr<TransportLoop> driver_;          ///< set once, before the first wait
  std::atomic<bool> receiving_{false};           ///< a thread is in receive_here()
  std::atomic<ThreadId> polling_{};              ///< that thread, while it polls
  std::vector<UniqueFunction<void()>> arrived_;  ///< posted by its poll; only that thread uses it
};

/// Holds what the parts of one worker's agent share. A member is constant once the worker has joined its
/// world, or thread-safe.
struct AgentState {
  AgentState(std::shared_ptr<Runtime> shared_runtime, FunctionTable table, ServiceOptions service);

  PeerId id() const { return {self.rank, incarnation}; }

  const std::shared_ptr<Runtime> runtime_owner;
  Runtime& runtime;
  const FunctionTable functions;
  const ServiceOptions options;
  const Devices devices;
  device::CopyStreams copies;
  ReceivedMemory received{copies, runtime.executor};  ///< for the thread that polls
  std::shared_ptr<DeviceMemory> device_memory;        ///< null: tensors go through host memory
  std::weak_ptr<WorkerBackend> backend;  ///< the agent; a posted job locks it to keep the agent alive
  WorkerInfo self;
  std::uint64_t instance = 0;
  std::uint32_t incarnation = 0;
  ProtocolRange wire = kWireProtocol;  ///< what this worker announced
  std::vector<Interceptor*> interceptors;

  PeerTable peers;
  const std::shared_ptr<AgentExecutor> continuations;
  CallTable calls;
  ServingTable serving;
  std::shared_ptr<References> references;
  std::unique_ptr<PeerChannels> channels;  ///< null in a world of one, which has no transport
  std::atomic<bool> stopping{false};
  std::atomic<std::uint64_t> sent{0};     ///< requests sent
  std::atomic<std::uint64_t> handled{0};  ///< requests answered
  std::atomic<std::uint64_t> running{0};  ///< requests received and not answered yet
};

}  // namespace torchspan::rpc
