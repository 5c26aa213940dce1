// Hierarchical groups of up to 64 hosts on the simulated network: messages between hosts and simulated time against the
// number of hosts and of ranks on each. The ranks of a host, which would share memory, use simulated connections too.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <gmock/gmock.h>
#include <numeric>

#include <ATen/ATen.h>

#include "collective/channels/channel_collectives.h"
#include "collective/hierarchical/hierarchical_collectives.h"
#include "collective/serial/serial_backend.h"
#include "collective/single.h"
#include "tests/conformance/collective_simulated.h"

namespace torchspan::testing::collective_simulated_hosts {
namespace {

using namespace collective;
using rendezvous::Membership;
using rendezvous::SimulatedWorld;
using std::chrono::microseconds;
using std::chrono::seconds;

constexpr Duration kInsideAHost = microseconds(2), kBetweenHosts = microseconds(20);
constexpr Duration kSimulatedLimit = seconds(60);

/// The host of the worker that owns this endpoint, "sim:worker12.direct.…".
int host_of(const std::string& endpoint, int ranks_per_host) {
  constexpr std::size_t kPrefix = 10;  // "sim:worker"
  return std::atoi(endpoint.c_str() + kPrefix) / ranks_per_host;
}

/// A group over all ranks, as make_group() makes it over several hosts.
Group make_hierarchical(Runtime& runtime, Membership& world, int hosts, int ranks_per_host) {
  const std::shared_ptr<Runtime> shared(std::shared_ptr<void>(), &runtime);
  const std::shared_ptr<WorldLink> link = WorldLink::make(shared, world);
  const int rank = world.self().rank, leader = rank / ranks_per_host * ranks_per_host;
  HierarchyPlan plan{.ranks = {}, .hosts = {}, .rank = rank, .announces = true};
  SerialOptions serial{.rank = rank, .timeout = kSimulatedLimit, .world = link};
  for (int other = 0; other < hosts * ranks_per_host; ++other) {
    plan.ranks.push_back(other);
    plan.hosts.push_back(other / ranks_per_host);
    serial.members.ranks.push_back(other);
    serial.members.names.push_back(describe(world.member(other)));
    serial.members.instances.push_back(world.member(other).instance);
  }
  std::vector<int> here(static_cast<std::size_t>(ranks_per_host));
  std::iota(here.begin(), here.end(), leader);
  const Group local =
      ranks_per_host == 1
          ? Group(SingleBackend::make(rank, shared, link))
          : Group::make(runtime, world,
                        {.backend = BackendKind::kNetwork, .ranks = here, .timeout = kSimulatedLimit});
  const ConnectLeaders connect = [link](const std::vector<int>& leaders, std::uint64_t split) {
    return channels::connect_channels(link, leaders,
                                      {.timeout = kSimulatedLimit, .lanes = 1, .rounds = {.split = split}});
  };
  return Group(SerialBackend::make(
      shared, std::make_unique<HierarchicalCollectives>(std::move(plan), local, connect), std::move(serial)));
}

class SimulatedHosts : public SimulatedGroupsSuite {};

TEST_F(SimulatedHosts, NameTheAbortThatBrokeTheirGroupAlsoWhenOtherRanksDropItFirst) {
  for (std::uint64_t seed = 1; seed <= seeds_or(6); ++seed) {
    expect_that_an_abort_is_named(
        seed, 9, [](Runtime& runtime, Membership& world) { return make_hierarchical(runtime, world, 3, 3); },
        false);
  }
}

/// What one operation costs, with the comparison of calls before it.
struct Cost {
  double messages = 0;  ///< that a host sends to others
  Duration time{};
  std::size_t bytes = 0;  ///< that cross from host to host
};
using Operation = std::function<void(const Group&)>;

std::vector<Cost> costs_of(int hosts, int ranks_per_host, const std::vector<Operation>& operations) {
  const int ranks = hosts * ranks_per_host;
  SimulatedWorld world(5, ranks, {.latency = kInsideAHost});
  const auto crosses = [=](const net::SimMessage& message) {
    return host_of(message.from, ranks_per_host) != host_of(message.to, ranks_per_host);
  };
  std::atomic<bool> counting{false};
  std::atomic<int> messages{0};
  std::atomic<std::size_t> bytes{0};
  world.network().observe([&](const net::SimMessage& message) {
    constexpr auto kPart = std::byte{2};
    if (!counting || message.header.empty() || message.header[0] != kPart || !crosses(message)) return;
    ++messages;
    bytes += message.size;
  });
  world.network().delay_if(crosses, kBetweenHosts - kInsideAHost);
  std::vector<Cost> costs;
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    {
      const Group group = make_hierarchical(runtime, *membership, hosts, ranks_per_host);
      for (const Operation& operation : operations) {
        membership->barrier("test.before", {}, world.in(seconds(60)));
        if (rank == 0) messages = 0, bytes = 0, counting = true;
        membership->barrier("test.begin", {}, world.in(seconds(60)));
        const TimePoint began = world.executor().now();
        operation(group);
        const Duration time = world.executor().now() - began;
        membership->barrier("test.end", {}, world.in(seconds(60)));
        if (rank != 0) continue;
        counting = false;
        costs.push_back({static_cast<double>(messages) / hosts, time, bytes});
      }
    }
    membership->leave(world.in(seconds(60)));
  });
  return costs;
}

Operation sum_of_length(std::int64_t length) {
  return [length](const Group& group) {
    at::Tensor mine = at::full({length}, group.rank(), at::kInt);
    group.all_reduce(mine).wait();
    EXPECT_TRUE((mine == group.size() * (group.size() - 1) / 2).all().item<bool>());
  };
}

TEST_F(SimulatedHosts, MessagesBetweenHostsGrowWithTheLogarithmOfTheHostsAndNotWithTheirRanks) {
  const std::vector<std::int64_t> lengths{256, 20000};
  const std::vector<Operation> sums{sum_of_length(lengths[0]), sum_of_length(lengths[1])};
  for (const int hosts : {2, 8, 16, 64}) {
    const auto alone = costs_of(hosts, 1, sums), in_pairs = costs_of(hosts, 2, sums);
    ASSERT_EQ(alone.size(), lengths.size());
    ASSERT_EQ(in_pairs.size(), lengths.size());
    const int steps = static_cast<int>(std::ceil(std::log2(hosts)));
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      std::printf(
          "%d hosts, %ld KiB: 1 rank each %.1f messages per host, %.0f us; 2 ranks each %.1f, %.0f us\n",
          hosts, static_cast<long>(lengths[i] * 4 / 1024), alone[i].messages, 1e6 * to_seconds(alone[i].time),
          in_pairs[i].messages, 1e6 * to_seconds(in_pairs[i].time));
      EXPECT_EQ(in_pairs[i].messages, alone[i].messages) << "only the first rank of each host sends";
      // Inside a host: the comparison of calls and the operation, before and after the exchange.
      EXPECT_LE(in_pairs[i].time, alone[i].time + 12 * kInsideAHost);
      if (hosts <= 8) continue;  // every first rank sends to every other one
      // As without hosts: one gather to compare the calls, and one for a small tensor, two for a larger one.
      EXPECT_LE(alone[i].messages, (2 + i) * static_cast<unsigned>(steps));
      EXPECT_LE(alone[i].time, kBetweenHosts * (static_cast<int>(2 + i) * steps + 2));
    }
  }
}

// All-to-alls, gathers and scatters once sent all data to all hosts, and reduce-scatters those of an all-reduce.
TEST_F(SimulatedHosts, DataCrossTheNetworkOnceToTheHostThatNeedsThem) {
  constexpr int kHosts = 3, kEach = 2, kRanks = kHosts * kEach;
  constexpr std::int64_t kLength = 30000;
  constexpr std::size_t kPart = kLength * sizeof(std::int64_t);
  const auto costs = costs_of(
      kHosts, kEach,
      {[](const Group& group) {
         std::vector<at::Tensor> parts;
         for (int to = 0; to < kRanks; ++to) parts.push_back(at::full({kLength}, group.rank() * 100 + to));
         const std::vector<at::Tensor> got = group.all_to_all(parts).wait();
         for (int from = 0; from < kRanks; ++from) {
           EXPECT_TRUE((got[static_cast<std::size_t>(from)] == from * 100 + group.rank()).all().item<bool>());
         }
       },
       [](const Group& group) {
         const auto got = group.gather(at::full({kLength}, group.rank()), 3).wait();
         ASSERT_EQ(got.size(), group.rank() == 3 ? std::size_t{kRanks} : 0);
         for (std::size_t from = 0; from < got.size(); ++from) {
           EXPECT_TRUE((got[from] == static_cast<int>(from)).all().item<bool>());
         }
       },
       [](const Group& group) {
         const at::Tensor mine = at::arange(kRanks * kLength) * (group.rank() + 1);
         const at::Tensor part = group.reduce_scatter(mine).wait();
         const at::Tensor all = at::arange(kRanks * kLength) * (kRanks * (kRanks + 1) / 2);
         EXPECT_TRUE(same_bits(part, all.narrow(0, group.rank() * kLength, kLength)));
       }});
  ASSERT_EQ(costs.size(), 3U);
  constexpr double kWithShapesAndHeaders = 1.05;
  EXPECT_LE(double(costs[0].bytes), kWithShapesAndHeaders * kPart * kRanks * (kRanks - kEach));
  EXPECT_LE(double(costs[1].bytes), kWithShapesAndHeaders * kPart * (kRanks - kEach));
  EXPECT_LE(double(costs[2].bytes), kWithShapesAndHeaders * kPart * kRanks * (kHosts - 1));
}

}  // namespace
}  // namespace torchspan::testing::collective_simulated_hosts
