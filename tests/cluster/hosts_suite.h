#pragma once
#include <torchspan/detail/net/network.h>
#include <torchspan/session/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/hosts.h"

namespace torchspan::testing {

/// All namespaces belong to one kernel, so the test sets which host a worker believes to be on.
inline WorkerOptions host_options() {
  WorkerOptions options = WorkerOptions::from_env();
  const std::string host = options.network.host_mark = std::getenv("TEST_HOST");
  // UCX also takes the loopback devices of one kernel for one device. The cables are named like the hosts.
  if (options.network.ucx) options.network.ucx->devices = host;
  return options;
}

/// A suite whose worlds span two hosts, if this system allows making them.
class Hosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!network_.trouble().empty()) GTEST_SKIP() << "no two hosts: " << network_.trouble();
  }
  /// Starts `scenario` on one of the hosts, as torchrun would.
  Process& start(ProcessWorld& world, int rank, const TestHost& host, const std::string& scenario,
                 std::map<std::string, std::string> changes = {}) {
    changes.insert({{"MASTER_ADDR", TestNetwork::kNear},
                    {"LOCAL_WORLD_SIZE", "2"},
                    {"LOCAL_RANK", std::to_string(rank % 2)},
                    {"TEST_HOST", &host == &network_.near ? "near" : "far"}});
    return world.start(rank, scenario, std::move(changes), host.through());
  }
  static bool says(ProcessWorld& world, Process& process, const std::string& word, Duration limit) {
    const Deadline deadline = world.executor().deadline_in(limit);
    while (process.output().find(word) == std::string::npos) {
      if (deadline.passed(world.executor().now())) return false;
      world.executor().sleep(std::chrono::milliseconds(10));
    }
    return true;
  }

  const TestNetwork network_;
};

}  // namespace torchspan::testing
