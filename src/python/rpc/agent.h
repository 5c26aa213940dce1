#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <torchspan/core/observation.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/core/spans.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/service.h>

#include "python/job.h"
#include "python/rpc/messages.h"

namespace torchspan::python {

using TorchWorker = torch::distributed::rpc::WorkerInfo;

/// The members of a world as torch's WorkerInfo, which stay where they are. Thread-safe.
class WorkerDirectory {
 public:
  explicit WorkerDirectory(TorchWorker self) : self_(std::move(self)) {}

  /// Before everything else. `membership` must live as long as calls are made.
  void begin(const rendezvous::Membership& membership) { membership_ = &membership; }
  /// Throws std::runtime_error that lists the workers.
  const TorchWorker& find(const std::string& name) const;
  const TorchWorker& find(torch::distributed::rpc::worker_id_t id) const;
  /// Those that have neither died nor left; in a fixed world, all.
  std::vector<TorchWorker> all() const;
  /// The rank of a worker in the membership. torch's id of this worker is another one in a world that it has alone.
  std::uint32_t rank_of(const TorchWorker& worker) const;
  std::string name_of(std::uint32_t rank) const;

 private:
  TorchWorker worker_of(const rendezvous::Member& member) const;
  template <class Matches>
  const TorchWorker& find_if(const Matches& matches, const std::string& what) const;

  const TorchWorker self_;
  const rendezvous::Membership* membership_ = nullptr;
  mutable Mutex mutex_;
  mutable std::deque<TorchWorker> known_ TORCHSPAN_GUARDED_BY(mutex_);  ///< those that were asked for
};

using TorchDeviceMap = torch::distributed::rpc::DeviceMap;

/// Where the tensors of calls to other workers, and of their results, are placed. Tensors travel through the hosts'
/// memory. Immutable.
class DeviceMaps {
 public:
  DeviceMaps(std::string self, std::unordered_map<std::string, TorchDeviceMap> maps)
      : self_(std::move(self)), maps_(std::move(maps)) {}

  const TorchDeviceMap& to(const std::string& worker) const;
  /// The devices of a call's tensors on `worker`; empty if all are on CPUs. `map`: instead of the map for the worker, if
  /// it is not empty. Throws c10::Error for a tensor on a device without a place there.
  std::vector<c10::Device> arguments(const std::vector<at::Tensor>& tensors, const std::string& worker,
                                     const TorchDeviceMap& map) const;
  /// The devices here of a result whose tensors are on `there`.
  std::vector<c10::Device> results(const std::vector<c10::Device>& there, const std::string& worker,
                                   const TorchDeviceMap& map) const;

  /// The devices of tensors; empty if all are on CPUs.
  static std::vector<c10::Device> of(const std::vector<at::Tensor>& tensors);
  /// Moves received tensors to `devices`; none for an empty list.
  static void place(std::vector<at::Tensor>& tensors, const std::vector<c10::Device>& devices);

 private:
  const std::string self_;
  const std::unordered_map<std::string, TorchDeviceMap> maps_;
  const TorchDeviceMap none_;
};

using JitFuture = torch::distributed::rpc::JitFuture;

/// What an agent and its pending calls count. Thread-safe.
struct AgentCounters {
  std::atomic<std::int64_t> client_calls{0};        ///< sent, and not answered or not completed
  std::atomic<std::int64_t> server_calls{0};        ///< received and not answered
  std::atomic<std::int64_t> server_async_calls{0};  ///< of these, whose handler has returned
  std::atomic<std::int64_t> running_handlers{0};
  std::atomic<std::int64_t> gil_waits{0};
  std::atomic<std::int64_t> gil_wait_us{0};
};

/// torch.distributed.rpc over the calls of a WorkerService: torch makes the messages and serves them, this class carries
/// them. Handlers and completions run on the worker's pool, never on the thread that receives. Thread-safe.
class Agent final : public torch::distributed::rpc::RpcAgent {
 public:
  struct Options {
    int threads = 16;  ///< handlers that run at the same time
    std::chrono::milliseconds timeout = std::chrono::seconds(60);
    std::unordered_map<std::string, TorchDeviceMap> device_maps;
    std::vector<c10::Device> devices;
    /// A member died or left; called on a thread of the pool.
    std::function<void(const std::string& name, const std::string& reason)> on_departure;
  };

  /// Joins; returns when all workers of a fixed world have. start() begins to serve. Throws Error.
  static std::shared_ptr<Agent> join(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                                     Options options);
  ~Agent() override;

  c10::intrusive_ptr<JitFuture> send(const TorchWorker& to, TorchMessagePtr message, float timeout,
                                     const TorchDeviceMap& device_map) override;
  const TorchWorker& getWorkerInfo(const std::string& name) const override { return directory_.find(name); }
  const TorchWorker& getWorkerInfo(torch::distributed::rpc::worker_id_t id) const override {
    return directory_.find(id);
  }
  std::vector<TorchWorker> getWorkerInfos() const override { return directory_.all(); }
  /// With `shutdown`: waits until no worker has outstanding calls, then leaves together with the others; in an open world
  /// waits for this worker's own. Without: waits until all workers call it and no call is outstanding. `timeout` in
  /// seconds; 0: no limit. Throws std::runtime_error that names a worker which died.
  void join(bool shutdown, float timeout) override;
  void sync() override {}
  void startImpl() override;
  void shutdownImpl() override;
  std::unordered_map<std::string, std::string> getMetrics() override;
  std::unordered_map<std::string, std::string> getDebugInfo() override;
  TorchDeviceMap getDeviceMap(const TorchWorker& to) const override { return device_maps_.to(to.name_); }
  const std::vector<c10::Device>& getDevices() const override { return devices_; }
  void addGilWaitTime(std::chrono::microseconds time) override;
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }

  /// Before start(): the bytes of all workers of a fixed world, by rank.
  std::vector<std::string> gather(const std::string& tag, const std::string& bytes);
  /// Before start(): the devices of the messages, instead of those of the options.
  void set_devices(std::vector<c10::Device> devices) { devices_ = std::move(devices); }
  /// Stops at the end of the program, which may have left handlers that never end: they are abandoned.
  void stop_at_exit();

 private:
  Agent(Job& job, const c10::intrusive_ptr<c10d::Store>& store, Options options);
  void serve(const SpanLink& call, wire::Payload& request, const std::shared_ptr<rpc::Completion>& reply);
  void departed(std::uint32_t rank, const Error& reason);
  /// Of a call with the agent's own time-out, of which 0 is none.
  Deadline call_deadline() const;
  void wait_for_all(Deadline deadline);
  rpc::WorkerBackend& backend() const { return *backend_; }

  const OwnerProcess process_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int threads_;
  const DeviceMaps device_maps_;
  std::vector<c10::Device> devices_;
  const std::function<void(const std::string&, const std::string&)> on_departure_;
  const std::shared_ptr<AgentCounters> counters_;
  WorkerDirectory directory_;
  const std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<Observation> observation_;  ///< ends after the service, whose calls it sees
  std::unique_ptr<rpc::WorkerService> service_;
  std::shared_ptr<rpc::WorkerBackend> backend_;
  std::unique_ptr<rendezvous::Membership> joined_;  ///< until start()
  rendezvous::Membership* membership_ = nullptr;
};

}  // namespace torchspan::python
