#include "launch/display/board.h"

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

}  // namespace
}  // namespace torchspan::launch::board_test
