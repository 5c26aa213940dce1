#pragma once
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/api/sim_executor.h"
#include "launch/supervisor/node_rounds.h"
#include "net/api/sim.h"

namespace torchspan::launch {

/// The hosts of a simulated job.
class SimulatedHosts {
 public:
  SimulatedHosts(std::uint64_t seed, int count)
      : count_(count), executor_(seed), network_(executor_, {.jitter = std::chrono::milliseconds(20)}) {}

  SimExecutor& executor() { return executor_; }
  NodeMeeting meeting(int node, int nodes) {
    NodeMeeting meeting;
    meeting.transports = [this, node](const std::string& endpoint, net::Handler& handler) {
      const bool named = endpoint == "store" || endpoint == questions_of(node);
      if (endpoint == questions_of(node)) asked_.insert(node);
      return network_.make_transport(named ? endpoint : name(node), handler, {});
    };
    meeting.join.name = meeting.join.host_id = name(node);
    meeting.join.rank = node;
    meeting.join.world_size = rendezvous::kOpenWorld;
    meeting.join.store_address = "sim:store";
    meeting.join.job = "job";
    meeting.join.timeout = std::chrono::seconds(10);
    meeting.nodes = nodes;
    return meeting;
  }
  net::SimNetwork& network() { return network_; }
  /// The name of the transport at which a launcher is asked.
  static std::string questions_of(int node) { return name(node) + ".direct.questions"; }
  /// Ends a launcher's connections, as the end of its process would.
  void kill(int node) {
    network_.kill(name(node));
    if (asked_.contains(node)) network_.kill(questions_of(node));
    if (node == 0) network_.kill("store");
  }
  /// Runs `body(node)` for every host, each as a thread, until all have ended.
  void run(const std::function<void(int)>& body) {
    executor_.run([&] {
      std::vector<Thread> threads;
      for (int node = 0; node < count_; ++node)
        threads.push_back(executor_.spawn(name(node), [&body, node] { body(node); }));
    });
  }

 private:
  static std::string name(int node) { return "launcher" + std::to_string(node); }

  const int count_;
  SimExecutor executor_;
  net::SimNetwork network_;
  std::set<int> asked_;  ///< launchers that accept questions
};

}  // namespace torchspan::launch
