// Rank 0's coordinator in simulated worlds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/detail/quorum/extension.h>
#include <torchspan/rpc/worker.h>

#include "quorum/api/generation_client.h"
#include "tests/support/cluster.h"

namespace torchspan::quorum::coordinator_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using torchspan::testing::ClusterOptions;
using torchspan::testing::SimCluster;

ClusterOptions open_world_with_quorum(std::uint64_t seed) {
  ClusterOptions options;
  options.workers = 1;
  options.seed = seed;
  options.open = true;
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<QuorumExtension>());
    return extensions;
  };
  return options;
}

constexpr Report kFirstReport{
    .holds_state = true, .target = 1, .late_limit = seconds(30), .too_few_limit = seconds(30)};

class CoordinatorOfSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, CoordinatorOfSeed, ::testing::Range<std::uint64_t>(1, 5));

TEST_P(CoordinatorOfSeed, BeginsWithTheRanksOfAnOpenWorldThatHasGaps) {
  SimCluster world(open_world_with_quorum(GetParam()));
  world.run([&](Worker& worker) {
    Generation theirs;
    std::uint64_t ended = 1;
    Thread other = world.start(2, 0, [&](rpc::WorkerService& service) {
      GenerationClient client(service.worker(), "trainer");
      theirs = client.next(kFirstReport);
      ended = client.departures(theirs);
      service.shutdown(world.executor().deadline_in(seconds(60)));
    });
    for (int i = 0; i < 1000 && worker.world_size() < 2; ++i)
      worker.runtime().executor.sleep(milliseconds(1));
    const TimePoint began = world.executor().now();
    GenerationClient client(worker, "trainer");
    const Generation mine = client.next(kFirstReport);
    EXPECT_LT(world.executor().now() - began, seconds(1)) << "it waited for a rank that does not exist";
    EXPECT_THAT(mine.ranks, ElementsAre(0, 2));
    other.join();
    EXPECT_EQ(theirs, mine);
    EXPECT_EQ(ended, 0u);
    for (int i = 0; i < 1000 && client.departures(mine) == 0; ++i)
      worker.runtime().executor.sleep(milliseconds(1));
    EXPECT_EQ(client.departures(mine), 1u) << "rank 2 has left";
  });
}

}  // namespace
}  // namespace torchspan::quorum::coordinator_test
