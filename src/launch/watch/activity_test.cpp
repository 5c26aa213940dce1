#include "launch/watch/activity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/api/step_part.h"

namespace torchspan::launch::activity_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = Activity::Kind;

std::vector<WorkerReport> workers(int world) {
  std::vector<WorkerReport> all(static_cast<std::size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    WorkerReport& worker = all[static_cast<std::size_t>(rank)];
    worker.rank = rank;
    worker.world = world;
    worker.name = "worker" + std::to_string(rank);
    worker.process_state = 'S';
  }
  return all;
}

TEST(Activity, WaitsForAFutureIfNothingElseIsKnown) {
  auto all = workers(2);
  all[0].open = {{"user", "step", 4, 17}, {"wait", "wait for a future", 3, 0}};
  all[1].open = {{"wait", "wait for a future", 3, 0}};
  all[1].pending = {{"f", "worker0", "", 3}};
  const auto activities = find_activities(all);
  EXPECT_EQ(activities[0].kind, Kind::kWaiting);
  EXPECT_EQ(activities[0].text, "waits for a future, 3.0 s");
  EXPECT_THAT(activities[0].waits_for, IsEmpty());
  EXPECT_EQ(activities[1].text, "waits for rank 0 in 'f', 3.0 s");
}

TEST(Activity, NamesTheRanksThatHaveNotReachedAnOperation) {
  auto all = workers(4);
  const int group = group_number(std::vector<int>{0, 1, 2, 3});
  all[0].open = {{"user", "step", 4, 17}, {"collective", "barrier", 0.3, 12, group}};
  all[2].open = {{"collective", "barrier", 0.1, 12, group}};
  all[1].open = {{"collective", "all_gather_bytes", 0.1, 11, group}};
  const auto activities = find_activities(all);
  EXPECT_EQ(activities[0].kind, Kind::kWaiting);
  EXPECT_THAT(activities[0].waits_for, ElementsAre(1, 3));
  EXPECT_EQ(activities[0].text, "waits for ranks 1,3 in 'barrier' number 12, 0.3 s");
  EXPECT_THAT(activities[1].waits_for, ElementsAre(3)) << "ranks further on have passed it";
  EXPECT_EQ(activities[3].text, "computes");
}

TEST(Activity, BlamesOnlyMembersOfTheGroup) {
  auto all = workers(4);
  const int group = group_number(std::vector<int>{0, 2});
  all[0].open = {{"collective", "barrier", 0.3, 12, group}};
  EXPECT_THAT(find_activities(all)[0].waits_for, ElementsAre(2));
}

TEST(Activity, CountsOperationsThatDoNotBlockAsWaitsOnceTheyAreOld) {
  auto all = workers(2);
  const int group = group_number(std::vector<int>{0, 1});
  all[0].open = {{"user", "step", 4, 17}, {"collective", "all_reduce", 0.1, 12, group}};
  EXPECT_EQ(find_activities(all)[0].kind, Kind::kComputing);
  all[0].open[1].seconds = 0.5;
  EXPECT_THAT(find_activities(all)[0].waits_for, ElementsAre(1));
}

TEST(Activity, ShowsTheMessageThatAWorkerWaitsFor) {
  auto all = workers(3);
  all[0].open = {{"message", "recv(Float [3] from rank 2, tag 0)", 3, 0, 1, 2}};
  all[1].open = {{"message", "recv(Float [3] from any rank, tag 0)", 3, 0, 1}};
  const auto activities = find_activities(all);
  EXPECT_EQ(activities[0].kind, Kind::kWaiting);
  EXPECT_EQ(activities[0].text, "waits in 'recv(Float [3] from rank 2, tag 0)', 3.0 s");
  EXPECT_THAT(activities[0].waits_for, ElementsAre(2));
  EXPECT_EQ(activities[1].kind, Kind::kWaiting);
  EXPECT_THAT(activities[1].waits_for, IsEmpty()) << "any rank may send";
}

TEST(Activity, NamesTheCallThatAWorkerHasWaitedForLongest) {
  auto all = workers(3);
  all[0].pending = {
      {"f", "worker1", "", 0.2}, {"g", "worker2", "train.cpp:41", 0.4}, {"h", "worker0", "", 9}};
  all[1].pending = {{"f", "worker2", "", 0.01}};
  all[2].serving = {{"x", "worker1", "", 0.4, false}, {"g", "worker0", "", 0.4, true}};
  const auto activities = find_activities(all);
  EXPECT_EQ(activities[0].text, "waits for rank 2 in 'g' at train.cpp:41, 0.4 s");
  EXPECT_THAT(activities[0].waits_for, ElementsAre(2));
  EXPECT_EQ(activities[1].kind, Kind::kComputing) << "a call that has just begun";
  EXPECT_EQ(activities[2].text, "serves 'g' for worker0, 0.4 s");
}

TEST(Activity, TellsStoppedSilentAndWaitingWorkersApart) {
  auto all = workers(4);
  all[0].process_state = 'T';
  all[0].process = 77;
  all[1].answers = false;
  all[2].open = {{"pipeline", "wait for activations", 2, 5}};
  all[3].open = {{"pipeline", "1F3", 2, 5, 3}};
  const auto activities = find_activities(all);
  EXPECT_EQ(activities[0].kind, Kind::kStopped);
  EXPECT_THAT(activities[0].text, HasSubstr("pid 77"));
  EXPECT_EQ(activities[1].kind, Kind::kSilent);
  EXPECT_EQ(activities[2].kind, Kind::kWaiting);
  EXPECT_EQ(activities[3].text, "computes in '1F3', 2.0 s");
  EXPECT_THAT(activities[3].waits_for, IsEmpty());
}

std::vector<Activity> sample(bool first_waits, bool second_waits) {
  std::vector<Activity> both{{0, first_waits ? Kind::kWaiting : Kind::kComputing},
                             {1, second_waits ? Kind::kWaiting : Kind::kComputing}};
  if (first_waits) both[0].waits_for = {1};
  if (second_waits) both[1].waits_for = {0};
  return both;
}

TEST(WaitShares, FindTheRankThatOthersWaitFor) {
  WaitShares shares;
  for (int i = 0; i < 40; ++i) {
    shares.add(sample(i % 2 == 0, false));
    if (i == 2) {
      EXPECT_FALSE(shares.straggler_share(1)) << "too few samples";
    }
  }
  EXPECT_NEAR(shares.straggler_share(1).value_or(0), 0.5, 0.1);
  EXPECT_FALSE(shares.straggler_share(0));
  EXPECT_FALSE(shares.straggler_share(7));
  for (int i = 0; i < 60; ++i) shares.add(sample(false, false));
  EXPECT_FALSE(shares.straggler_share(1)) << "that was long ago";
}

TEST(WaitShares, NameNoneIfRanksWaitForEachOtherInTurns) {
  WaitShares shares;
  for (int i = 0; i < 40; ++i) shares.add(sample(i % 2 == 0, i % 2 == 1));
  EXPECT_FALSE(shares.straggler_share(0));
  EXPECT_FALSE(shares.straggler_share(1));
}

}  // namespace
}  // namespace torchspan::launch::activity_test
