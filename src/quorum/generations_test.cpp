#include "quorum/generations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quorum/rule_world.h"

namespace torchspan::quorum::generations_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A table with the last answer to each rank.
struct Table {
  explicit Table(int ranks) : Table(testing::first_ranks(ranks)) {}
  explicit Table(std::set<int> ranks)
      : table(std::move(ranks),
              {.announce = [this](int rank, const Generation& one) { generations[rank] = one; },
               .refuse = [this](int rank, const Error& error) { errors.emplace(rank, error); }}) {}

  void report(int rank, Report report) {
    report.target = std::max<std::int64_t>(report.target, 10);
    report.late_limit = seconds(5);
    report.too_few_limit = seconds(20);
    table.report(rank, report, now);
  }
  void pass(Duration time) {
    now += time;
    table.tick(now);
  }
  /// The first generation of all ranks, whose members all hold the state.
  void begin(int ranks) {
    for (int round = 0; round < 2; ++round) {
      for (int rank = 0; rank < ranks; ++rank)
        report(rank, {.generation = static_cast<std::uint64_t>(round), .committed = 0, .holds_state = true});
    }
  }

  TimePoint now{};
  std::map<int, Generation> generations;
  std::map<int, Error> errors;
  Generations table;
};

TEST(Generations, TakeTheFirstRanksStateAtTheBeginning) {
  Table table(3);
  table.report(2, {.committed = 7, .holds_state = true});
  table.report(1, {.committed = 0, .holds_state = true});
  EXPECT_TRUE(table.generations.empty()) << "rank 0 has not reported";
  table.report(0, {.committed = 4, .holds_state = true});
  ASSERT_EQ(table.generations.size(), 3u);
  EXPECT_EQ(table.generations.at(2).step, 4);
  EXPECT_THAT(table.generations.at(2).ranks, ElementsAre(0, 1, 2));
  EXPECT_THAT(table.generations.at(2).holders, ElementsAre(0));
}

TEST(Generations, BeginWithTheRanksOfAWorldThatHasGaps) {
  Table table(std::set<int>{0, 2});
  table.report(0, {.committed = 0, .holds_state = true});
  EXPECT_TRUE(table.generations.empty()) << "rank 2 has not reported";
  table.report(2, {.committed = 0, .holds_state = true});
  ASSERT_EQ(table.generations.count(0), 1u);
  EXPECT_THAT(table.generations.at(0).ranks, ElementsAre(0, 2));
}

TEST(Generations, WaitForTheStateOfRank0AtTheBeginningHoweverLateItIs) {
  Table table(3);
  table.report(1, {.committed = 0, .holds_state = true});
  table.pass(seconds(6));
  table.pass(seconds(100));
  EXPECT_TRUE(table.generations.empty()) << "rank 0 still loads its checkpoint";
  EXPECT_TRUE(table.errors.empty());
  table.report(0, {.committed = 4, .holds_state = true});
  ASSERT_EQ(table.generations.count(1), 1u);
  EXPECT_EQ(table.generations.at(1).step, 4);
  EXPECT_THAT(table.generations.at(1).ranks, ElementsAre(0, 1)) << "rank 2 was late";
  EXPECT_THAT(table.generations.at(1).holders, ElementsAre(0));
  table.report(0, {.generation = 1, .committed = 5, .holds_state = true});
  table.report(2, {.committed = 0, .holds_state = true});
  table.report(1, {.generation = 1, .committed = 5, .holds_state = true});
  EXPECT_THAT(table.generations.at(2).ranks, ElementsAre(0, 1, 2));
  EXPECT_THAT(table.generations.at(2).holders, ElementsAre(0, 1));
}

TEST(Generations, CommitAStepThatOnlyADeadRankHadCommitted) {
  Table table(3);
  table.begin(3);
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true, .prepared = true});
  table.report(1, {.generation = 2, .committed = 3, .holds_state = true, .prepared = true});
  table.table.gone(2, "it died", table.now);
  EXPECT_EQ(table.generations.at(0).step, 4);
  EXPECT_THAT(table.generations.at(0).holders, ElementsAre(0, 1));
}

TEST(Generations, VoidAStepForWhichARankHasNotVoted) {
  Table table(3);
  table.begin(3);
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true, .prepared = true});
  table.report(1, {.generation = 2, .committed = 3, .holds_state = true});
  table.table.gone(2, "it died", table.now);
  EXPECT_EQ(table.generations.at(0).step, 3);
}

TEST(Generations, AreOverForARankThatWasLeftOut) {
  Table table(3);
  EXPECT_FALSE(table.table.is_over_for(1)) << "there is none yet";
  table.begin(3);
  for (const int rank : {0, 1, 2}) EXPECT_FALSE(table.table.is_over_for(rank));
  table.table.gone(2, "it died", table.now);
  table.report(2, {.holds_state = true});
  table.report(0, {.generation = 2, .holds_state = true});
  EXPECT_TRUE(table.table.is_over_for(1)) << "ranks wait";
  table.pass(seconds(6));
  EXPECT_THAT(table.generations.at(0).ranks, ElementsAre(0, 2));
  EXPECT_FALSE(table.table.is_awaited());
  EXPECT_TRUE(table.table.is_over_for(1)) << "it was late";
  for (const int rank : {0, 2}) EXPECT_FALSE(table.table.is_over_for(rank));
}

TEST(Generations, AreOverForAllMembersOnceOneHasWithdrawn) {
  Table table(3);
  table.begin(3);
  table.table.gone(2, "its program failed", table.now);
  EXPECT_FALSE(table.table.is_awaited()) << "no rank has reported";
  for (const int rank : {0, 1, 2}) EXPECT_TRUE(table.table.is_over_for(rank));
  for (const int rank : {0, 1}) table.report(rank, {.generation = 2, .holds_state = true});
  EXPECT_THAT(table.generations.at(1).ranks, ElementsAre(0, 1));
  for (const int rank : {0, 1}) EXPECT_FALSE(table.table.is_over_for(rank));
}

TEST(Generations, LeaveOutALateRankAndTakeItBackWithoutItsState) {
  Table table(2);
  table.begin(2);
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true});
  EXPECT_EQ(table.generations.at(0).number, 2u);
  table.pass(seconds(4));
  EXPECT_EQ(table.generations.at(0).number, 2u);
  table.pass(seconds(2));
  EXPECT_THAT(table.generations.at(0).ranks, ElementsAre(0));
  EXPECT_FALSE(table.table.is_awaited());
  table.report(1, {.generation = 2, .committed = 4, .holds_state = true});
  EXPECT_TRUE(table.table.is_awaited());
  table.report(0, {.generation = 3, .committed = 3, .holds_state = true});
  EXPECT_EQ(table.generations.at(1).step, 3);
  EXPECT_THAT(table.generations.at(1).holders, ElementsAre(0));
}

TEST(Generations, WaitForTheLeastNumberOfRanks) {
  Table table(2);
  table.begin(2);
  table.table.gone(1, "worker1 died", table.now);
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true, .min_ranks = 2});
  table.pass(seconds(19));
  EXPECT_TRUE(table.errors.empty());
  table.report(1, {});
  EXPECT_EQ(table.generations.at(0).ranks.size(), 2u);
  table.report(0, {.generation = 3, .committed = 4, .holds_state = true, .min_ranks = 2});
  table.table.gone(1, "worker1 died again", table.now);
  table.pass(seconds(21));
  ASSERT_EQ(table.errors.count(0), 1u);
  EXPECT_EQ(table.errors.at(0).kind(), ErrorKind::kTimedOut);
  EXPECT_THAT(table.errors.at(0).message(),
              HasSubstr("only 1 rank can train, and min_ranks is 2: rank 1: worker1 died"));
}

/// All ranks gave up, so nobody has a state: ranks that come back do not wait for others.
TEST(Generations, EndAtOnceWhenNoRankThatIsLeftHasTheState) {
  Table table(2);
  table.begin(2);
  table.table.gone(1, "worker1 died", table.now);
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true, .min_ranks = 2});
  table.pass(seconds(21));
  ASSERT_EQ(table.errors.count(0), 1u);
  EXPECT_EQ(table.errors.at(0).kind(), ErrorKind::kTimedOut);
  table.errors.clear();
  table.table.gone(0, "its run() threw", table.now);
  table.report(0, {.min_ranks = 2});
  ASSERT_EQ(table.errors.count(0), 1u);
  EXPECT_EQ(table.errors.at(0).kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(table.errors.at(0).message(), HasSubstr("restart the job from its last checkpoint"));
}

TEST(Generations, NameOnlyTheRanksThatAreMissingWhenTooFewAreLeft) {
  Table table(3);
  table.begin(3);
  table.table.gone(1, "worker1 died", table.now);
  table.table.gone(2, "worker2 died", table.now);
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true, .min_ranks = 3});
  table.report(1, {});  // its replacement
  table.pass(seconds(21));
  ASSERT_EQ(table.errors.count(0), 1u);
  EXPECT_THAT(table.errors.at(0).message(),
              HasSubstr("only 2 ranks can train, and min_ranks is 3: rank 2: worker2 died"));
  EXPECT_THAT(table.errors.at(0).message(), ::testing::Not(HasSubstr("worker1")));
}

TEST(Generations, AreCompleteWhenNoRankWantsAnotherStep) {
  Table table(2);
  table.begin(2);
  table.report(0, {.generation = 2, .committed = 10, .holds_state = true});
  table.report(1, {.generation = 2, .committed = 9, .holds_state = true, .prepared = true});
  EXPECT_TRUE(table.generations.at(1).complete);
  EXPECT_EQ(table.generations.at(1).step, 10);
  table.report(0, {.generation = 3, .committed = 10, .holds_state = true, .target = 20});
  table.report(1, {.generation = 3, .committed = 10, .holds_state = true});
  EXPECT_FALSE(table.generations.at(1).complete) << "rank 0 goes on, and rank 1 gets there later";
  EXPECT_EQ(table.generations.at(1).target, 20);
}

TEST(Generations, TakeALateComerOfCompleteTrainingThatWantsMoreSteps) {
  Table table(2);
  table.begin(2);
  table.report(0, {.generation = 2, .committed = 10, .holds_state = true});
  table.table.gone(1, "it died", table.now);
  ASSERT_TRUE(table.generations.at(0).complete);
  table.report(1, {.target = 20});  // its next run()
  EXPECT_FALSE(table.generations.at(1).complete);
  table.report(0, {.generation = 3, .committed = 10, .holds_state = true, .target = 20});
  EXPECT_THAT(table.generations.at(1).ranks, ElementsAre(0, 1));
  EXPECT_THAT(table.generations.at(1).holders, ElementsAre(0));
  EXPECT_EQ(table.generations.at(1).step, 10);
}

TEST(Generations, KeepTheMembersWhenTheOnlyOneThatWaitedForThemIsGone) {
  Table table(3);
  table.begin(3);
  table.report(1, {.generation = 2, .committed = 3, .holds_state = true});
  table.table.gone(1, "it died", table.now);
  table.pass(seconds(6));
  table.report(0, {.generation = 2, .committed = 3, .holds_state = true});
  table.report(2, {.generation = 2, .committed = 3, .holds_state = true});
  EXPECT_TRUE(table.errors.empty());
  EXPECT_THAT(table.generations.at(0).holders, ElementsAre(0, 2));
}

TEST(Generations, AnswerALateComerOfCompleteTraining) {
  Table table(1);
  table.report(0, {.committed = 10, .holds_state = true});
  ASSERT_TRUE(table.generations.at(0).complete);
  table.report(1, {});
  EXPECT_TRUE(table.generations.at(1).complete);
  EXPECT_THAT(table.generations.at(1).ranks, ElementsAre(0));
}

}  // namespace
}  // namespace torchspan::quorum::generations_test
