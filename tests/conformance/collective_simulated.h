#pragma once
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <string>

#include <ATen/Functions.h>

#include <torchspan/collective.h>

#include "rendezvous/simulated_world.h"
#include "tests/conformance/collective_oracle.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"

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

  using MakeGroup = std::function<collective::Group(Runtime& runtime, rendezvous::Membership& world)>;

  /// Rank 1 aborts a group while the others are in a call, or before it, and each rank drops the group as soon as it has
  /// learned of that. All must name the abort, also those that first receive the end of a rank that has dropped the group.
  void expect_that_an_abort_is_named(std::uint64_t seed, int ranks, const MakeGroup& make_group,
                                     bool has_messages = true) {
    using collective::Group;
    struct Call {
      const char* name;
      void (*run)(Group& group);
    };
    for (const Call& call : {
             Call{"all_reduce", [](Group& group) { group.all_reduce(at::ones({1 << 16})).wait(); }},
             Call{"barrier", [](Group& group) { group.barrier(); }},
             Call{"split", [](Group& group) { group.split(0, 0).all_gather(at::ones({3})).wait(); }},
             Call{"recv",
                  [](Group& group) {
                    const int from = group.rank() == 3 ? 2 : 3;  // not the rank that aborts
                    group.recv(at::zeros({3}), from).wait();
                  }},
         }) {
      if (!has_messages && call.name == std::string("recv")) continue;
      SCOPED_TRACE(::testing::Message() << call.name << ", seed " << seed);
      rendezvous::SimulatedWorld world(seed, ranks, {.jitter = std::chrono::milliseconds(20)});
      world.run([&](int rank) {
        Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
        const auto membership =
            rendezvous::Membership::join(runtime, world.transports(rank), world.options(rank));
        {
          Group group = make_group(runtime, *membership);
          group.barrier();
          const auto later = static_cast<std::int64_t>(
              std::mt19937_64(seed * 100 + static_cast<std::uint64_t>(rank))() % 40);
          const Error error = error_of([&] {
            world.executor().sleep(std::chrono::milliseconds(rank == 1 ? 220 : 200 + later));
            if (rank == 1) group.abort(Error(ErrorKind::kCancelled, "enough"));
            call.run(group);
          });
          EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << "rank " << rank << ": " << error.what();
          EXPECT_THAT(error.what(), ::testing::HasSubstr("enough"));
        }
        membership->barrier("test.end", {}, world.in(std::chrono::seconds(60)));
        membership->leave(world.in(std::chrono::seconds(30)));
      });
    }
  }
};

}  // namespace torchspan::testing
