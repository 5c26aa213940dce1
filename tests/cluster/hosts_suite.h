#pragma once
#include <torchspan/session.h>

#include "session/session_on_host.h"
#include "tests/support/cluster_main.h"
#include "tests/support/hosts.h"

namespace torchspan::testing {

/// The session of a scenario. All namespaces share one kernel, so the test names the host of each worker.
inline Session join_on_host(FunctionTable functions = {}) {
  WorkerOptions options = WorkerOptions::from_env();
  const std::string host = std::getenv("TEST_HOST");
  // UCX, too, takes the loopback devices of one kernel for the same device. The cables are named after the hosts.
  if (options.network.ucx) options.network.ucx->devices = host;
  return make_session_on_host(host, std::move(options), std::move(functions));
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
    changes.merge(host.variables());
    return world.start(rank, scenario, std::move(changes));
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
