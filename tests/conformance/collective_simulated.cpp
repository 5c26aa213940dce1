// Groups over their own connections on the simulated network: every seed determines a whole run.
#include "tests/conformance/collective_simulated.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <gmock/gmock.h>

#include <ATen/ATen.h>

namespace torchspan::testing::collective_simulated {
namespace {

using namespace collective;
using rendezvous::Membership;
using rendezvous::SimulatedWorld;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class SimulatedGroups : public SimulatedGroupsSuite {};

/// One step of a random program, which all ranks derive from the same numbers.
struct Step {
  Step(std::uint64_t number, int ranks) : seed(number * 7919 + 17) {
    const std::array<std::int64_t, 5> lengths{0, 1, 100, 3001, ranks == 2 ? 200003 : 100000 / ranks};
    constexpr std::array<at::ScalarType, 4> kDtypes{at::kFloat, at::kHalf, at::kLong, at::kDouble};
    constexpr std::array<ReduceOp, 3> kReductions{kSum, kMax, kProduct};
    kind = number % 5;
    length = lengths[number / 5 % lengths.size()];
    dtype = kDtypes[number / 25 % kDtypes.size()];
    reduction = kReductions[number / 100 % kReductions.size()];
  }
  std::uint64_t seed = 0, kind = 0;
  std::int64_t length = 0;
  at::ScalarType dtype = at::kFloat;
  ReduceOp reduction = kSum;
};

void expect_like_one_process(Group& group, const Step& step) {
  const int ranks = group.size(), rank = group.rank();
  const auto inputs = random_inputs(ranks, {step.length * ranks}, step.dtype, step.seed);
  const at::Tensor mine = inputs[rank].clone();
  switch (step.kind) {
    case 0:
      EXPECT_TRUE(
          same_bits(group.all_reduce(mine, step.reduction).wait(), reduce_alone(inputs, step.reduction)));
      break;
    case 1:
      EXPECT_TRUE(same_bits(group.reduce_scatter(mine, step.reduction).wait(),
                            reduce_alone(inputs, step.reduction).narrow(0, rank * step.length, step.length)));
      break;
    case 2: {
      const auto all = group.all_gather(mine).wait();
      for (int from = 0; from < ranks; ++from) EXPECT_TRUE(same_bits(all[from], inputs[from]));
      break;
    }
    case 3: {
      const int root = static_cast<int>(step.seed % static_cast<std::uint64_t>(ranks));
      EXPECT_TRUE(same_bits(group.broadcast(mine, root).wait(), inputs[root]));
      break;
    }
    default: {
      std::vector<at::Tensor> parts;
      for (int to = 0; to < ranks; ++to) parts.push_back(mine.narrow(0, to * step.length, step.length));
      const auto all = group.all_to_all(parts).wait();
      for (int from = 0; from < ranks; ++from) {
        EXPECT_TRUE(same_bits(all[from], inputs[from].narrow(0, rank * step.length, step.length)));
      }
    }
  }
}

TEST_F(SimulatedGroups, RandomProgramsComputeWhatOneProcessComputes) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (std::uint64_t seed = 1; seed <= seeds_or(2); ++seed) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, seed " << seed);
      SimulatedWorld world(seed, ranks, {.jitter = milliseconds(1)});
      run(world, seconds(60), [&](Group& group, Membership&) {
        for (std::uint64_t step = 0; step < 12; ++step) {
          expect_like_one_process(group, Step(seed * 1009 + step * 61, ranks));
        }
        group.barrier();
      });
    }
  }
}

TEST_F(SimulatedGroups, SumsOfManyRanksHaveTheBitsOfOneProcess) {
  for (const int ranks : {9, 16, 19}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks");
    SimulatedWorld world(static_cast<std::uint64_t>(ranks), ranks, {.jitter = microseconds(100)});
    struct Sum {
      std::vector<at::Tensor> inputs;
      at::Tensor wanted;
    };
    std::vector<Sum> sums;
    for (const std::int64_t length : {0, 1, 5, 700, 4001, 20001, 200003}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
        auto inputs = random_inputs(ranks, {length}, dtype, sums.size());
        at::Tensor wanted = reduce_alone(inputs, kSum);
        sums.push_back({std::move(inputs), std::move(wanted)});
      }
    }
    run(world, seconds(60), [&](Group& group, Membership&) {
      for (const Sum& sum : sums) {
        const at::Tensor mine = sum.inputs[group.rank()].clone();
        EXPECT_TRUE(same_bits(group.all_reduce(mine).wait(), sum.wanted)) << mine.numel();
      }
      const auto all = group.all_gather(sums[4].inputs[group.rank()]).wait();
      for (int from = 0; from < ranks; ++from) EXPECT_TRUE(same_bits(all[from], sums[4].inputs[from]));
    });
  }
}

TEST_F(SimulatedGroups, NameTheAbortThatBrokeThemAlsoWhenOtherRanksDropThemFirst) {
  for (std::uint64_t seed = 1; seed <= seeds_or(10); ++seed) {
    expect_that_an_abort_is_named(seed, 9, [](Runtime& runtime, Membership& world) {
      return Group::make(runtime, world, {.backend = BackendKind::kNetwork, .timeout = seconds(20)});
    });
  }
}

// The receiver finds the difference, and may drop the group before the sender has learned of it.
TEST_F(SimulatedGroups, NameBothCallsOfAMismatchedMessageAlsoWhenTheReceiverDropsTheGroupFirst) {
  for (std::uint64_t seed = 1; seed <= seeds_or(20); ++seed) {
    for (const std::int64_t length : {2, 100'000}) {
      SCOPED_TRACE(::testing::Message() << length << " elements, seed " << seed);
      SimulatedWorld world(seed, 3, {.jitter = milliseconds(20)});
      run(world, seconds(20), [&](Group& group, Membership&) {
        if (group.rank() == 2) return;
        const Error error = error_of([&] {
          if (group.rank() == 0) group.send(at::ones({length}), 1).wait();
          if (group.rank() == 1) group.recv(at::ones({length + 1}), 0).wait();
        });
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << "rank " << group.rank() << ": " << error.what();
        EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("called send("), HasSubstr("called recv(")));
      });
    }
  }
}

/// What one operation costs a rank, with the comparison of calls before it.
struct Cost {
  double messages = 0;  ///< that a rank sends
  Duration time{};
};
std::vector<Cost> costs_of(int ranks, const std::vector<std::function<void(const Group&)>>& operations) {
  SimulatedWorld world(3, ranks, {.latency = microseconds(20)});
  std::atomic<bool> counting{false};
  std::atomic<int> messages{0};
  world.network().observe([&](const net::SimMessage& message) {
    constexpr auto kPart = std::byte{2};
    if (counting && !message.header.empty() && message.header[0] == kPart) ++messages;
  });
  std::vector<Cost> costs;
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    {
      const Group group =
          Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(60)});
      for (const auto& operation : operations) {
        membership->barrier("test.before", {}, world.in(seconds(60)));
        if (rank == 0) messages = 0, counting = true;
        membership->barrier("test.begin", {}, world.in(seconds(60)));
        const TimePoint began = world.executor().now();
        operation(group);
        const Duration time = world.executor().now() - began;
        membership->barrier("test.end", {}, world.in(seconds(60)));
        if (rank != 0) continue;
        counting = false;
        costs.push_back({static_cast<double>(messages) / ranks, time});
      }
    }
    membership->leave(world.in(seconds(60)));
  });
  return costs;
}

TEST_F(SimulatedGroups, MessagesAndTimeOfAnAllReduceGrowWithTheLogarithmOfTheRanksUntilItIsLarge) {
  const auto steps = [](int ranks) { return std::ceil(std::log2(ranks)); };
  for (const int ranks : {2, 8, 16, 64}) {
    std::vector<std::function<void(const Group&)>> operations;
    for (const std::int64_t length : {256, 20000, 1 << 20}) {
      operations.emplace_back([=](const Group& group) {
        const at::Tensor mine = at::ones({length});
        group.all_reduce(mine).wait();
        EXPECT_EQ(mine[length - 1].item<int>(), ranks);
      });
    }
    const auto costs = costs_of(ranks, operations);
    ASSERT_EQ(costs.size(), 3U);
    const Cost &small = costs[0], &medium = costs[1], &large = costs[2];
    const auto row = [&](const char* name, const Cost& cost) {
      std::printf("%d ranks, %s: %.1f messages per rank, %.0f us\n", ranks, name, cost.messages,
                  1e6 * to_seconds(cost.time));
    };
    row("1 KiB", small), row("78 KiB", medium), row("4 MiB", large);
    if (ranks <= 8) continue;  // every rank sends to every other one
    EXPECT_LE(small.messages, 2 * steps(ranks));
    EXPECT_LE(medium.messages, 3 * steps(ranks));
    EXPECT_LE(small.time, microseconds(20) * (2 * static_cast<int>(steps(ranks)) + 2));
    EXPECT_LE(medium.time, microseconds(20) * (3 * static_cast<int>(steps(ranks)) + 2));
    const auto chunks = std::ceil(double(4 << 20) / ranks / double(64 << 10));
    EXPECT_LE(large.messages, 2 * chunks * (ranks - 1) + steps(ranks));
  }
}

// Every rank once sent a message to every other one.
TEST_F(SimulatedGroups, MessagesOfSmallReduceScattersAndAllToAllsGrowWithTheLogarithmOfTheRanks) {
  for (const int ranks : {9, 16, 64}) {
    const auto costs = costs_of(
        ranks, {[=](const Group& group) {
                  const at::Tensor mine = at::arange(ranks * 20) * (group.rank() + 1);
                  const at::Tensor part = group.reduce_scatter(mine).wait();
                  const at::Tensor all = at::arange(ranks * 20) * (ranks * (ranks + 1) / 2);
                  EXPECT_TRUE(same_bits(part, all.narrow(0, group.rank() * 20, 20)));
                },
                [=](const Group& group) {
                  std::vector<at::Tensor> parts;
                  for (int to = 0; to < ranks; ++to) {
                    parts.push_back(at::full({1 + to % 3}, group.rank() * 1000 + to));
                  }
                  const std::vector<at::Tensor> got = group.all_to_all(parts).wait();
                  for (int from = 0; from < ranks; ++from) {
                    EXPECT_TRUE(same_bits(got[static_cast<std::size_t>(from)],
                                          at::full({1 + group.rank() % 3}, from * 1000 + group.rank())));
                  }
                }});
    ASSERT_EQ(costs.size(), 2U);
    std::printf("%d ranks: reduce_scatter %.1f, all_to_all %.1f messages per rank\n", ranks,
                costs[0].messages, costs[1].messages);
    const double steps = std::ceil(std::log2(ranks));
    EXPECT_LE(costs[0].messages, 2 * steps);
    // The ranks also gather the shapes of all parts, whose sizes come first.
    EXPECT_LE(costs[1].messages, 4 * steps);
  }
}

TEST_F(SimulatedGroups, ADeathAtAnyTimeIsNamedOnAllOtherRanks) {
  for (const int ranks : {2, 3, 4, 8}) {
    for (std::uint64_t seed = 1; seed <= seeds_or(4); ++seed) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, seed " << seed);
      SimulatedWorld world(seed, ranks, {.jitter = microseconds(50)});
      const Duration when = time_of_death(seed);
      std::atomic<int> named{0};
      world.run([&](int rank) {
        Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
        const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
        std::optional<Group> group;
        try {
          group.emplace(
              Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(20)}));
        } catch (const Error&) {
          ADD_FAILURE() << "the group was not made";
          return;
        }
        Thread killer;
        if (rank == 1) {
          killer = world.executor().spawn("killer", [&] {
            world.executor().sleep(when);
            world.kill(1);
          });
        }
        try {
          for (;;) group->all_reduce(at::ones({100000})).wait();
        } catch (const Error& error) {
          if (rank == 1) return;
          EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
          EXPECT_THAT(error.what(), HasSubstr("worker1"));
          ++named;
        }
        const Error later = error_of([&] { group->barrier(); });
        EXPECT_THAT(later.what(), HasSubstr("worker1")) << "the first cause stays";
        group.reset();
        membership->leave(world.in(seconds(30)));
      });
      EXPECT_EQ(named, ranks - 1);
    }
  }
}

/// Worker 1 is killed at a time that depends on the seed; every other process is killed as soon as it has an error, so
/// that some see the end of a second process. Each must name worker 1 first. `call` of a group of all never returns.
void expect_the_first_death_named(std::uint64_t seed, Duration when,
                                  const std::function<void(Group&)>& call) {
  constexpr int kRanks = 4;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  SimulatedWorld world(seed, kRanks, {.jitter = microseconds(500)});
  std::atomic<int> named{0};
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    std::optional<Group> group =
        Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(20)});
    Thread killer;
    if (rank == 1) {
      killer = world.executor().spawn("killer", [&] {
        world.executor().sleep(when);
        world.kill(1);
      });
    }
    const Error error = error_of([&] { call(*group); });
    if (rank != 1) {
      const std::string& text = error.message();
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << text;
      EXPECT_LT(text.find("worker1"), text.find("died")) << "rank " << rank << ": " << text;
      for (const char* other : {"worker0 ", "worker2 ", "worker3 "}) {
        EXPECT_LE(text.find("worker1"), text.find(other)) << "rank " << rank << ": " << text;
      }
      ++named;
      world.executor().sleep(milliseconds(1));  // what it has sent arrives; its end takes longer
      world.kill(rank);
    }
    group.reset();
  });
  EXPECT_EQ(named, kRanks - 1);
}

TEST_F(SimulatedGroups, TheFirstOfSeveralDeathsIsNamedByCollectiveOperations) {
  for (std::uint64_t seed = 1; seed <= seeds_or(20); ++seed) {
    expect_the_first_death_named(seed, time_of_death(seed), [](Group& group) {
      for (;;) group.all_reduce(at::ones({2000})).wait();
    });
  }
}

/// Rank 2 waits for rank 1, rank 3 for rank 2 only, and rank 0 for rank 3 only.
TEST_F(SimulatedGroups, TheFirstOfSeveralDeathsIsNamedByMessages) {
  for (std::uint64_t seed = 1; seed <= seeds_or(20); ++seed) {
    expect_the_first_death_named(seed, time_of_death(seed), [](Group& group) {
      const int size = group.size(), previous = (group.rank() + size - 1) % size;
      for (;;) {
        const auto sent = group.send(at::ones({10}), (group.rank() + 1) % size);
        group.recv(at::zeros({10}), previous).wait();
        if (group.rank() != 0) sent.wait();
      }
    });
  }
}

/// The connections between workers 1 and 2 break, and rank 0 reaches both. `call` of a group of all never returns.
void expect_the_reporter_of_a_cut_named(std::uint64_t seed, Duration when,
                                        const std::function<void(Group&)>& call) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  SimulatedWorld world(seed, 3, {.jitter = microseconds(500)});
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    {
      Group group =
          Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(20)});
      Thread network;
      if (rank == 0) {
        network = world.executor().spawn("network", [&] {
          world.executor().sleep(when);
          for (const std::string& one : world.direct(1)) {
            for (const std::string& other : world.direct(2)) world.network().sever(one, other);
          }
        });
      }
      const Error error = error_of([&] { call(group); });
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      EXPECT_THAT(error.what(),
                  ::testing::AnyOf(::testing::AllOf(HasSubstr("the connection to worker1 (rank 1"),
                                                    HasSubstr("as worker2 (rank 2")),
                                   ::testing::AllOf(HasSubstr("the connection to worker2 (rank 2"),
                                                    HasSubstr("as worker1 (rank 1"))));
      EXPECT_THAT(error.what(), HasSubstr("the world still counts worker"));
    }
    membership->barrier("test.end", {}, world.in(seconds(30)));
    membership->leave(world.in(seconds(30)));
  });
}

TEST_F(SimulatedGroups, TheRankThatLostAnotherOneIsNamedWhereTheWorldReachesBoth) {
  for (std::uint64_t seed = 1; seed <= seeds_or(10); ++seed) {
    expect_the_reporter_of_a_cut_named(seed, time_of_death(seed), [](Group& group) {
      for (;;) group.all_reduce(at::ones({2000})).wait();
    });
    expect_the_reporter_of_a_cut_named(seed, milliseconds(20) + time_of_death(seed), [](Group& group) {
      const int size = group.size(), previous = (group.rank() + size - 1) % size;
      for (;;) {
        const auto sent = group.send(at::ones({10}), (group.rank() + 1) % size);
        group.recv(at::zeros({10}), previous).wait();
        if (group.rank() != 0) sent.wait();
      }
    });
  }
}

TEST_F(SimulatedGroups, ABarrierNamesTheRanksForWhichItWaits) {
  SimulatedWorld world(7, 3);
  ::testing::internal::CaptureStderr();
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank));
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    {
      const Group group =
          Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(60)});
      if (rank == 2) world.executor().sleep(seconds(25));
      group.barrier();
    }
    membership->leave(world.in(seconds(30)));
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  for (const char* waited : {"10 s", "20 s"}) {
    EXPECT_THAT(log, HasSubstr(std::string("barrier(), call 1 of the group, has waited ") + waited +
                               " for worker2 (rank 2"));
  }
  EXPECT_THAT(log, ::testing::Not(HasSubstr("[worker2]")));
}

TEST_F(SimulatedGroups, ARankWhoseDataStopArrivingIsLate) {
  for (std::uint64_t seed = 1; seed <= seeds_or(3); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    SimulatedWorld world(seed, 3);
    std::atomic<int> failed{0};
    run(world, seconds(2), [&](Group& group, Membership& membership) {
      group.all_reduce(at::ones({10})).wait();
      membership.barrier("test.before", {}, world.in(seconds(10)));
      if (group.rank() == 0) {
        world.network().block(
            [](const net::SimMessage& message) { return message.from.find("worker1.direct") == 4; });
      }
      membership.barrier("test.blocked", {}, world.in(seconds(10)));
      const Error error = error_of([&] { group.all_reduce(at::ones({300000})).wait(); });
      if (group.rank() != 1) {
        EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("worker1"));
        EXPECT_THAT(error.what(), HasSubstr("made 1 calls so far"));
      }
      ++failed;
      membership.barrier("test.after", {}, world.in(seconds(30)));
      if (group.rank() == 0) world.network().unblock();
    });
    EXPECT_EQ(failed, 3);
  }
}

TEST_F(SimulatedGroups, SplitsMakeConnectionsOfTheirOwn) {
  SimulatedWorld world(5, 4);
  run(world, seconds(60), [](Group& group, Membership&) {
    const Group part = group.split(group.rank() % 2, group.rank());
    at::Tensor mine = at::full({70001}, group.rank());
    part.all_reduce(mine).wait();
    EXPECT_TRUE((mine == 2 * (group.rank() % 2) + 2).all().item<bool>());
    group.barrier();
  });
}

}  // namespace
}  // namespace torchspan::testing::collective_simulated
