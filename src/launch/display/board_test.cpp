#include "launch/display/board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::launch::board_test {
namespace {

ProgressReport report(std::int64_t step) {
  ProgressReport report;
  report.epoch = 2;
  report.epochs = 5;
  report.step = step;
  report.steps = 469;
  report.loss = 0.5;
  report.rate = 5120;
  report.unit = "images";
  report.seconds_left = 63;
  return report;
}

TEST(Board, WritesRanksAsRanges) {
  EXPECT_EQ(format_ranks({}), "");
  EXPECT_EQ(format_ranks({3}), "3");
  EXPECT_EQ(format_ranks({0, 1}), "0,1");
  EXPECT_EQ(format_ranks({0, 1, 2, 5, 7, 8, 9}), "0-2,5,7-9");
}

TEST(Board, ShowsTheReportAndTheStateOfEveryRank) {
  Board board(5);
  EXPECT_FALSE(board.has_reports());
  EXPECT_EQ(board.line(), "running 0-4");
  board.set_report(0, report(17));
  EXPECT_TRUE(board.has_reports());
  EXPECT_EQ(board.line(), "epoch 2/5  step 17/469  loss 0.5000  5,120 images/s  1m03s left | running 0-4");
  board.set_state(1, WorkerState::kDone);
  board.set_state(2, WorkerState::kFailed);
  board.set_state(3, WorkerState::kStopping);
  board.set_state(4, WorkerState::kStopped);
  EXPECT_EQ(board.line(),
            "epoch 2/5  step 17/469  loss 0.5000  5,120 images/s  1m03s left | running 0, stopping 3, failed "
            "2, stopped 4, done 1");
}

TEST(Board, NamesTheRankThatIsFarthestBehind) {
  Board board(4);
  board.set_report(0, report(17));
  board.set_report(1, report(17));
  board.set_report(2, report(12));
  board.set_report(3, report(15));
  EXPECT_NE(board.line().find("left  rank 2 at step 12 | running 0-3"), std::string::npos) << board.line();
}

TEST(Board, TakesTheNumbersOfTheLowestRankThatReports) {
  Board board(3);
  board.set_report(2, report(9));
  board.set_report(1, report(8));
  EXPECT_NE(board.line().find("step 8/469"), std::string::npos);
}

TEST(Board, CutsTheNumbersBeforeTheStates) {
  Board board(2);
  board.set_report(0, report(17));
  const std::string states = " | running 0,1";
  EXPECT_EQ(board.line(9 + states.size()), "epoch 2/5" + states);
  EXPECT_EQ(board.line(12 + states.size()), "epoch 2/5  s" + states);
  EXPECT_EQ(board.line(5).size(), 5u);
}

std::vector<Activity> activities(int world) {
  std::vector<Activity> all;
  for (int rank = 0; rank < world; ++rank) all.push_back({rank, Activity::Kind::kComputing, "computes"});
  return all;
}

TEST(Board, ShowsALineForEachRankBelowTheNumbers) {
  Board board(3);
  EXPECT_EQ(board.block(80, 8, false), std::vector<std::string>{board.line(80)});
  auto all = activities(3);
  all[0] = {0, Activity::Kind::kWaiting, "waits for rank 2 in 'f', 0.3 s", {2}};
  board.set_activities(all);
  EXPECT_EQ(board.block(80, 8, false)[0], "running 0-2");
  board.set_report(0, report(17));
  board.set_report(1, report(16));
  board.set_state(2, WorkerState::kFailed);
  EXPECT_THAT(board.block(80, 8, false),
              ::testing::ElementsAre("epoch 2/5  step 17/469  loss 0.5000  5,120 images/s  1m03s left",
                                     "  rank 0   waits for rank 2 in 'f', 0.3 s",
                                     "  rank 1   computes; at step 16", "  rank 2   has failed"));
  EXPECT_EQ(board.block(30, 8, false)[0], "epoch 2/5  step 17/469  loss 0");
}

TEST(Board, MarksStragglersAndUsesColoursOnlyIfAsked) {
  Board board(2);
  auto all = activities(2);
  all[0] = {0, Activity::Kind::kWaiting, "waits", {1}};
  for (int i = 0; i < 5; ++i) board.set_activities(all);
  EXPECT_EQ(board.block(80, 8, false)[2], "* rank 1   computes; others wait for it 100 % of the time");
  EXPECT_EQ(board.block(80, 8, true)[1], "\x1b[2m  rank 0   waits\x1b[0m");
  EXPECT_THAT(board.block(80, 8, true)[2], ::testing::StartsWith("\x1b[1;33m* rank 1"));
}

TEST(Board, ShowsTheRanksWithProblemsIfNotAllFit) {
  Board board(40);
  auto all = activities(40);
  all[31] = {31, Activity::Kind::kSilent, "does not answer"};
  all[5].kind = Activity::Kind::kWaiting;
  board.set_activities(all);
  EXPECT_THAT(board.block(80, 5, false),
              ::testing::ElementsAre("running 0-39", "  rank 0   computes", "  rank 1   computes",
                                     "! rank 31  does not answer", "  … 1 more wait, 36 more compute"));
}

TEST(Board, KeepsControlCharactersOutOfTheBlock) {
  Board board(1);
  board.set_activities({{0, Activity::Kind::kComputing, "in 'a\x1b[2J\nb'"}});
  EXPECT_EQ(board.block(80, 5, false)[1], "  rank 0   in 'a [2J b'");
}

TEST(Board, NumbersTheWorkersOfAnotherHostByTheirRanks) {
  Board board(2, 4);
  auto all = activities(6);
  all.erase(all.begin(), all.begin() + 4);
  board.set_activities(all);
  board.set_state(1, WorkerState::kFailed);
  EXPECT_THAT(board.block(80, 5, false),
              ::testing::ElementsAre("running 4, failed 5", "  rank 4   computes", "  rank 5   has failed"));
  board.set_report(0, report(17));
  board.set_report(1, report(12));
  EXPECT_NE(board.line().find("rank 5 at step 12 | running 4, failed 5"), std::string::npos) << board.line();
}

}  // namespace
}  // namespace torchspan::launch::board_test
