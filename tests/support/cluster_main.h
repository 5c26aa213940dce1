#pragma once
#include <cstdio>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/hosts.h"
#include "tests/support/processes.h"

namespace torchspan::testing {

using Scenario = std::function<void()>;

/// What the processes of a test source may do, for programs of several sources: each declares one such constant. The
/// processes of `suite` start a scenario as "suite.name".
struct Scenarios {
  Scenarios(const std::string& suite, const std::map<std::string, Scenario>& scenarios) {
    for (const auto& [name, scenario] : scenarios) all()[suite + '.' + name] = scenario;
  }
  /// Those of all sources, like the tests that GoogleTest registers.
  static std::map<std::string, Scenario>& all() {
    static std::map<std::string, Scenario> scenarios;
    return scenarios;
  }
};

/// main() of a cluster suite: runs the scenario that the environment names, or the tests. An exception of a
/// scenario is printed and makes the exit code 1.
inline int cluster_main(int argc, char** argv,
                        const std::map<std::string, Scenario>& scenarios = Scenarios::all()) {
  const auto run = [&scenarios] {
    try {
      TestHost::enter_from_env();
      scenarios.at(std::getenv("TORCHSPAN_TEST_SCENARIO"))();
      std::fflush(nullptr);
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return 1;
    }
  };
  if (std::getenv("TORCHSPAN_TEST_SCENARIO") != nullptr) return run();
  ForkServer::start([&](int, char**) { return run(); });
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}

/// For scenarios: ends the process with `text` unless the condition holds.
inline void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error("not so: " + text);
}

/// Checks that every process of the world ends by itself with code 0.
inline void expect_all_end_well(ProcessWorld& world, Duration limit = std::chrono::seconds(60)) {
  for (std::size_t i = 0; i < world.size(); ++i) {
    EXPECT_TRUE(world.process(i).wait(world.executor(), limit)) << "rank " << i << " still runs";
  }
  for (std::size_t i = 0; i < world.size(); ++i) {
    EXPECT_EQ(world.process(i).exit_code(), 0) << "rank " << i << ":\n" << world.process(i).output();
  }
}

}  // namespace torchspan::testing
