#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <random>
#include <string>

#include <torchspan/collective/group.h>

#include "rendezvous/simulated_world.h"
#include "tests/conformance/collective_oracle.h"
#include "tests/support/environment.h"

namespace torchspan::testing {

/// Tests of groups over their own connections on the simulated network.
class SimulatedGroupsSuite : public ::testing::Test {
 protected:
  using Body = std::function<void(collective::Group&, rendezvous::Membership&)>;

  /// How many seeds each test runs with; TORCHSPAN_CASES sets another number, and `make long` sets a large one.
  static std::uint64_t seeds_or(std::uint64_t otherwise) { return number_from("TORCHSPAN_CASES", otherwise); }
  /// When a rank dies: within the first dozens of operations, as all later ones are like these.
  static Duration time_of_death(std::uint64_t seed) {
    return std::chrono::microseconds(std::mt19937_64(seed)() % 5000);
  }

  /// Runs `body` with a group of all ranks, on each.
  void run(rendezvous::SimulatedWorld& world, Duration timeout, const Body& body) {
    world.run([&](int rank) {
      Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
      const auto membership =
          rendezvous::Membership::join(runtime, world.transports(rank), world.options(rank));
      {
        collective::Group group = collective::Group::make(
            runtime, *membership, {.backend = collective::BackendKind::kNetwork, .timeout = timeout});
        body(group, *membership);
      }
      membership->leave(world.in(std::chrono::seconds(30)));
    });
  }
};

}  // namespace torchspan::testing
