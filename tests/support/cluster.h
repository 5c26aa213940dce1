#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/core/sim_executor.h>
#include <torchspan/net/sim.h>
#include <torchspan/net/stream.h>
#include <torchspan/rpc/service.h>

namespace torchspan::testing {

struct ClusterOptions {
  int workers = 2;
  std::uint64_t seed = 1;
  FunctionTable functions = {};
  std::function<std::vector<std::unique_ptr<rpc::Extension>>()> extensions = {};
  Duration default_timeout = std::chrono::seconds(60);
  std::size_t threads = 4;
  net::SimNetwork::Options network = {};
  rpc::ServiceOptions service = {};  ///< limits; name, rank, threads and timeout are set from what is here
  bool graceful = true;              ///< whether run() ends every worker by shutdown()
};

/// A world of workers in this process on the simulated network and clock. run() starts them, runs `body` on
/// each at once (in a simulated thread of its own), shuts them down and rethrows the first failure.
class SimCluster {
 public:
  explicit SimCluster(ClusterOptions options)
      : options_(std::move(options)), executor_(options_.seed), network_(executor_, options_.network) {}

  SimExecutor& executor() { return executor_; }
  net::SimNetwork& network() { return network_; }
  static std::string name(int rank) { return "worker" + std::to_string(rank); }

  /// The worker dies at once: both its transports go silent and its peers hear the end of their connections.
  void kill(int rank) {
    network_.kill(name(rank));
    network_.kill(name(rank) + ".membership");
    if (rank == 0) network_.kill("store");
  }

  void run(std::function<void(Worker&)> body) {
    std::vector<std::exception_ptr> failures(options_.workers);
    executor_.run([&] {
      std::vector<Thread> threads;
      for (int rank = 0; rank < options_.workers; ++rank) {
        threads.push_back(executor_.spawn(name(rank), [&, rank] {
          try {
            live(rank, body);
          } catch (...) {
            failures[rank] = std::current_exception();
          }
        }));
      }
    });
    for (auto& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  void live(int rank, const std::function<void(Worker&)>& body) {
    Runtime runtime(executor_, name(rank));
    rpc::ServiceOptions service_options = options_.service;
    service_options.name = name(rank);
    service_options.rank = static_cast<std::uint32_t>(rank);
    service_options.listen = "sim:" + name(rank);
    service_options.default_timeout = options_.default_timeout;
    service_options.threads = options_.threads;
    service_options.stopped_limit = Duration::zero();  // all of them are this process
    rpc::WorkerService service(
        runtime, options_.functions, service_options,
        [&](net::Handler& handler) { return network_.make_transport(name(rank), handler, {}); },
        options_.extensions ? options_.extensions() : std::vector<std::unique_ptr<rpc::Extension>>());
    rendezvous::JoinOptions join;
    join.name = name(rank);
    join.rank = rank;
    join.world_size = options_.workers;
    join.store_address = "sim:store";
    join.address = service.address();
    join.epoch = static_cast<std::uint64_t>(rank) + 1;
    service.start(rendezvous::Membership::join(
        runtime,
        [&](const std::string& endpoint, net::Handler& handler) {
          return network_.make_transport(endpoint, handler, {});
        },
        join));
    body(service.worker());
    if (options_.graceful) service.shutdown();
  }

  ClusterOptions options_;
  SimExecutor executor_;
  net::SimNetwork network_;
};

}  // namespace torchspan::testing
