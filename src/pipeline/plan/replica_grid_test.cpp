#include "pipeline/plan/replica_grid.h"

#include <gmock/gmock.h>

namespace torchspan::pipeline::replica_grid_test {
namespace {

using ::testing::ElementsAre;

TEST(ReplicaGrid, SplitsTheOwnersOfAllStages) {
  const auto split = owners_by_replica({"a", "b", "a", "c", "d", "c"}, 2, 3);
  EXPECT_THAT(split, ElementsAre(ElementsAre("a", "b", "a"), ElementsAre("c", "d", "c")));
  EXPECT_THAT(owners_by_replica({"a", "b"}, 1, 5),
              ElementsAre(ElementsAre("a", "b")));  // the plan refuses it
}

TEST(ReplicaGrid, ListsWorkersByReplicaAndByStage) {
  const ReplicaGrid grid{.mine = 1, .names = {{"a", "b"}, {"c", "d"}}, .ranks = {{0, 1}, {2, 3}}};
  EXPECT_EQ(grid.count(), 2);
  EXPECT_THAT(grid.all_names(), ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(grid.all_ranks(), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(grid.names_of(1), ElementsAre("b", "d"));
}

}  // namespace
}  // namespace torchspan::pipeline::replica_grid_test
