#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "core/api/sim_executor.h"
#include "net/api/sim.h"
#include "tests/support/errors.h"

namespace torchspan::rendezvous {

using torchspan::testing::error_of;

/// For tests: workers of one world as simulated threads, each with its own runtime and endpoints.
class SimulatedWorld {
 public:
  SimulatedWorld(std::uint64_t seed, int size, net::SimNetwork::Options options = {})
      : size_(size), executor_(seed), network_(executor_, options) {}

  SimExecutor& executor() { return executor_; }
  net::SimNetwork& network() { return network_; }
  int size() const { return size_; }
  Deadline in(Duration time) const { return executor_.deadline_in(time); }

  MembershipOptions options(int rank) const {
    MembershipOptions options;
    options.name = "worker" + std::to_string(rank);
    options.rank = rank;
    options.world_size = size_;
    options.store_address = "sim:store";
    options.address = "sim:" + options.name;
    options.job = "job";
    options.instance = 1000 + static_cast<std::uint64_t>(rank);
    options.timeout = std::chrono::seconds(10);
    return options;
  }
  /// Endpoints are named by `number`, so that workers which claim one name still differ.
  TransportFactory transports(int number) {
    return [this, number](const std::string& endpoint, net::Handler& handler) {
      const std::string mine = "member" + std::to_string(number);
      if (endpoint == "store") return network_.make_transport(endpoint, handler, {});
      if (endpoint.find(".direct.") == std::string::npos) return network_.make_transport(mine, handler, {});
      direct_[number].push_back(endpoint);
      return network_.make_transport(endpoint, handler, {});
    };
  }
  /// Names of the transports that this worker made for direct connections.
  const std::vector<std::string>& direct(int number) { return direct_[number]; }
  std::unique_ptr<Membership> join(int number, MembershipOptions options) {
    auto runtime = std::make_unique<Runtime>(executor_, options.name, LogLevel::kOff);
    Runtime& mine = *runtime;
    runtimes_.push_back(std::move(runtime));
    return Membership::join(mine, transports(number), std::move(options));
  }
  std::unique_ptr<Membership> join(int rank) { return join(rank, options(rank)); }

  /// Kills a worker's transports, as the end of its process would.
  void kill(int rank) {
    network_.kill("member" + std::to_string(rank));
    for (const std::string& name : direct_[rank]) network_.kill(name);
    if (rank == 0) network_.kill("store");
  }

  /// Runs `body(rank)` for every rank, each as a thread, until all have ended.
  void run(const std::function<void(int)>& body) {
    executor_.run([&] {
      std::vector<Thread> threads;
      for (int rank = 0; rank < size_; ++rank) {
        threads.push_back(executor_.spawn("worker" + std::to_string(rank), [&body, rank] { body(rank); }));
      }
    });
  }

 private:
  const int size_;
  SimExecutor executor_;
  net::SimNetwork network_;
  std::vector<std::unique_ptr<Runtime>> runtimes_;
  std::map<int, std::vector<std::string>> direct_;  ///< of one simulated thread at a time
};

}  // namespace torchspan::rendezvous
