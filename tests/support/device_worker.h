#pragma once
// Workers of cluster suites that share device memory, and what they count.
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/detail/rpc/service.h>

#include "net/api/local.h"
#include "net/api/ucx.h"
#include "rendezvous/api/environment.h"
#include "tests/support/cluster_main.h"
#include "tests/support/test_device.h"

namespace torchspan::testing {

inline std::int64_t counter(Worker& worker, const char* name) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()[name]);
}
/// How many tensors a worker has sent through device memory.
inline std::int64_t sent(Worker& worker) { return counter(worker, "rpc.device_memory.sent"); }
/// How many it has received; their memory is on its way back.
inline std::int64_t received(Worker& worker) { return counter(worker, "rpc.device_memory.received"); }

inline constexpr Function<sent> kSent{"sent"};
inline constexpr Function<received> kReceived{"received"};

/// A worker of the world that the environment describes, with calls, autograd and pipelines: over shared memory and Unix
/// sockets, where it lends each peer 1 MiB of each device, or over UCX, which carries tensors from device to device, if
/// TEST_UCX is set and TEST_NO_DEVICES is not.
class DeviceWorker {
 public:
  /// Serves `functions`, kSent and kReceived.
  explicit DeviceWorker(FunctionTable functions = {},
                        std::shared_ptr<const device::DeviceRuntime> runtime = test_runtime())
      : environment_(rendezvous::read_environment(rendezvous::process_environment())),
        executor_(make_executor()),
        runtime_(std::make_shared<Runtime>(*executor_, environment_.name, LogLevel::kWarning)) {
    const net::Secret secret = rendezvous::load_secret(environment_);
    rpc::ServiceOptions options;
    options.name = environment_.name;
    options.rank = static_cast<std::uint32_t>(environment_.rank);
    const bool over_ucx = std::getenv("TEST_UCX") != nullptr;
    options.listen = std::string("unix:") + std::getenv("TORCHSPAN_RUNTIME_DIR") + "/" + environment_.name;
    if (over_ucx) options.listen = "ucx:127.0.0.1:0";
    options.default_timeout = std::chrono::seconds(20);
    options.device_runtime = std::move(runtime);
    options.device_staging_bytes = 1 << 20;
    if (environment_.rank == 0)
      options.device_maps["worker1"] = DeviceMap({{test_device(0), test_device(1 % test_device_count())}});
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    extensions.push_back(std::make_unique<pipeline::PipelineExtension>());
    service_ = std::make_unique<rpc::WorkerService>(
        runtime_, std::move(functions.add(kSent, kReceived)), options,
        [&](net::Handler& handler) {
          net::TransportOptions transport;
          transport.secret = secret;
          if (!over_ucx) return net::make_local_transport(*executor_, handler, transport);
          if (std::getenv("TEST_NO_DEVICES") == nullptr)
            transport.device_memory = on_cuda() ? net::DeviceMemoryKind::kCuda : net::DeviceMemoryKind::kHost;
          return net::make_ucx_transport(*executor_, handler, transport,
                                         {.network = net::UcxNetwork::kIsolated, .devices = "lo"});
        },
        std::move(extensions));
    rendezvous::MembershipOptions join;
    join.name = environment_.name;
    join.rank = environment_.rank;
    join.world_size = environment_.world_size;
    join.store_address = environment_.store_address();
    join.address = service_->address();
    join.job = environment_.job;
    service_->start(
        rendezvous::Membership::join(*runtime_, rendezvous::stream_transports(*executor_, secret), join));
  }

  Worker& worker() { return service_->worker(); }
  Executor& executor() { return *executor_; }
  void shutdown() { service_->shutdown(executor_->deadline_in(std::chrono::seconds(30))); }
  void stop() { service_->stop("left, as the test wants"); }

 private:
  const rendezvous::WorkerEnvironment environment_;
  const std::unique_ptr<Executor> executor_;
  const std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<rpc::WorkerService> service_;
};

/// Waits until the condition holds, at most 20 s; returns whether it does.
inline bool await(Executor& executor, const std::function<bool()>& condition) {
  const Deadline deadline = executor.deadline_in(std::chrono::seconds(20));
  while (!condition() && !deadline.passed(executor.now())) executor.sleep(std::chrono::milliseconds(20));
  return condition();
}

using Counts = std::vector<std::int64_t>;  ///< by rank

/// What a function counts on each worker.
template <class F>
Counts counts_of(Worker& worker, const F& function) {
  Counts all;
  for (int rank = 0; rank < worker.world_size(); ++rank) all.push_back(worker.rpc_sync(rank, function));
  return all;
}
/// Waits until the workers have received all that others sent through device memory, so that the memory returns.
inline void await_returns(DeviceWorker& self) {
  const auto total = [&](const auto& function) {
    const Counts all = counts_of(self.worker(), function);
    return std::accumulate(all.begin(), all.end(), std::int64_t{0});
  };
  require(await(self.executor(), [&] { return total(kReceived) == total(kSent); }),
          "all tensors that were sent through device memory are received");
}
/// Runs a scenario over UCX's TCP; skips the test without UCX. `without`: the rank whose UCX carries no
/// device memory.
inline void run_over_ucx(const std::string& scenario, int workers = 2, int without = -1) {
  ProcessWorld world(workers);
  for (int rank = 0; rank < workers; ++rank) {
    std::map<std::string, std::string> changes{{"TEST_UCX", "1"}};
    if (rank == without) changes["TEST_NO_DEVICES"] = "1";
    world.start(rank, scenario, changes);
  }
  world.process(0).wait(world.executor(), std::chrono::seconds(60));
  if (world.process(0).output().find("built without UCX") != std::string::npos) GTEST_SKIP() << "no UCX";
  expect_all_end_well(world);
}

/// Ends the process if the stand-in devices saw a race.
inline void require_no_race() {
  for (const std::string& race : StandInStreams::get().take_races()) require(false, race);
}

}  // namespace torchspan::testing
