// What an all-reduce over connections costs in large groups: every rank of one group, or the leaders of hosts.
#include <atomic>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <torchspan/collective.h>

#include "rendezvous/simulated_world.h"
#include "tests/scale/measurements.h"

namespace torchspan::testing::scale::collective_scale_test {
namespace {

using namespace collective;
using rendezvous::Membership;
using rendezvous::SimulatedWorld;
using std::chrono::microseconds;
using std::chrono::seconds;

struct Cost {
  double messages = 0;  ///< that a rank sends
  double bytes = 0;
  double store_bytes = 0;  ///< that it gets from the store
  Duration time{};
};

/// One all-reduce of `length` floats by a group of `ranks` leaders of hosts, whose other ranks share memory with
/// them and send nothing. Counts the making of the group, too.
struct Costs {
  Cost making;
  std::vector<Cost> reductions;
};
Costs costs_of(int ranks, const std::vector<std::int64_t>& lengths) {
  SimulatedWorld world(3, ranks, {.latency = microseconds(20)});
  Traffic traffic(world.network());
  Costs costs;
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    TimePoint began;
    const auto begin = [&](const char* tag) {
      membership->barrier("before", {}, world.in(seconds(60)));
      if (rank == 0) traffic.take();
      membership->barrier(tag, {}, world.in(seconds(60)));
      began = world.executor().now();
    };
    const auto end = [&] {
      const Duration time = world.executor().now() - began;
      membership->barrier("end", {}, world.in(seconds(60)));
      if (rank != 0) return Cost{};
      const Traffic::Counts counts = traffic.take();
      return Cost{counts.direct_messages / ranks, counts.direct_bytes / ranks, counts.store_bytes / ranks,
                  time};
    };
    {
      begin("making");
      const Group group =
          Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(60)});
      const Cost making = end();
      if (rank == 0) costs.making = making;
      for (const std::int64_t length : lengths) {
        begin("reducing");
        at::Tensor mine = at::ones({length});
        group.all_reduce(mine).wait();
        EXPECT_EQ(mine[length - 1].item<int>(), ranks);
        const Cost cost = end();
        if (rank == 0) costs.reductions.push_back(cost);
      }
      membership->barrier("counted", {}, world.in(seconds(60)));  // the end of a group sends messages, too
    }
    membership->leave(world.in(seconds(60)));
  });
  return costs;
}

/// `make scale` also measures the leaders of larger worlds on hosts of eight workers, and with sixteen of them. A group of
/// P ranks has P² connections, each with 64 KiB of probes when it is made: 256 ranks take minutes.
std::vector<int> group_sizes() {
  std::vector<int> sizes{16, 32};
  for (const int workers : world_sizes()) {
    for (const int ranks : {workers / 16, workers / 8}) {
      if (ranks > sizes.back() && ranks <= 128) sizes.push_back(ranks);
    }
  }
  return sizes;
}

TEST(CollectiveScale, AnAllReduceOfAFewBytesTakesStepsThatGrowWithTheLogarithmOfTheRanks) {
  for (const int ranks : group_sizes()) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    const Costs costs = costs_of(ranks, {256, 20000});
    ASSERT_EQ(costs.reductions.size(), 2U);
    const auto row = [&](const char* what, const Cost& cost) {
      record(what, ranks,
             {{"messages_per_rank", cost.messages},
              {"bytes_per_rank", cost.bytes},
              {"store_bytes_per_rank", cost.store_bytes},
              {"microseconds", microseconds_of(cost.time)}});
    };
    // Two connections to every other rank, or four on large machines, and a probe in each.
    EXPECT_LE(costs.making.messages, 4 * (ranks - 1));
    EXPECT_LE(costs.making.store_bytes, 250 * ranks + 1000) << "the addresses of all ranks";
    row("group", costs.making), row("all-reduce of 1 KiB", costs.reductions[0]);
    row("all-reduce of 78 KiB", costs.reductions[1]);
    const double steps = log2_of(ranks);
    EXPECT_LE(costs.reductions[0].messages, 4 * steps + 2);
    EXPECT_LE(costs.reductions[1].messages, 5 * steps + 2);
    EXPECT_LE(microseconds_of(costs.reductions[0].time), 20 * (2 * steps + 4));
    EXPECT_LE(microseconds_of(costs.reductions[1].time), 20 * (3 * steps + 4));
  }
}

}  // namespace
}  // namespace torchspan::testing::scale::collective_scale_test
