#include "elastic/failed_generations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdexcept>
#include <string>
#include <vector>

namespace torchspan::elastic::failed_generations_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct FailedGenerationsTest : ::testing::Test {
  void fail(std::uint64_t deaths = 0) {
    failures.begin({.number = ++number, .ranks = {0, 2}, .holders = {0}}, departures);
    failures.failed(Error(ErrorKind::kTimedOut, "the broadcast took too long"));
    failures.settle(departures += deaths);
  }
  void fail_all_but_the_last() {
    for (int count = 1; count < FailedGenerations::kMostInARow; ++count) fail();
  }

  std::vector<std::string> lines;
  Log log{"worker0", LogLevel::kWarning, [this](LogLevel level, const std::string& line) {
            EXPECT_EQ(level, LogLevel::kWarning);
            lines.push_back(line);
          }};
  ElasticOptions options{.step_timeout = std::chrono::seconds(7), .name = "t"};
  FailedGenerations failures{log, options};
  std::uint64_t number = 0, departures = 3;
};

TEST_F(FailedGenerationsTest, ThrowTheLastReasonWithAdviceAfterTheLastOne) {
  fail_all_but_the_last();
  try {
    fail();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(
        error.message(),
        AllOf(HasSubstr("generation 5 of the elastic trainer 't' (ranks 0, 2) failed before its first step"),
              HasSubstr("the broadcast took too long"), HasSubstr("ElasticOptions::step_timeout (7 s)")));
  }
}

TEST_F(FailedGenerationsTest, WarnWithTheReason) {
  fail();
  EXPECT_THAT(lines,
              ElementsAre(AllOf(HasSubstr("1 of 5 in a row"), HasSubstr("the broadcast took too long"))));
}

TEST_F(FailedGenerationsTest, DoNotCountWhenAMemberEnded) {
  for (int count = 0; count < 20; ++count) EXPECT_NO_THROW(fail(/*deaths=*/1));
  EXPECT_TRUE(lines.empty());
  EXPECT_NO_THROW(fail_all_but_the_last());
  EXPECT_THROW(fail(), Error);
}

TEST_F(FailedGenerationsTest, CountFromTheStartAfterAStep) {
  for (int round = 0; round < 3; ++round) {
    EXPECT_NO_THROW(fail_all_but_the_last());
    failures.begin({.number = ++number, .ranks = {0}, .holders = {0}}, departures);
    failures.committed();
    failures.failed(Error(ErrorKind::kTimedOut, "a rank was stopped after a step"));
    EXPECT_NO_THROW(failures.settle(departures));
  }
}

/// The vote on the first step ended on other ranks only.
TEST_F(FailedGenerationsTest, DoNotCountAStepThatIsCommittedAfterTheFailure) {
  fail_all_but_the_last();
  failures.begin({.number = ++number, .ranks = {0, 2}, .holders = {0}}, departures);
  failures.failed(Error(ErrorKind::kTimedOut, "the vote took too long"));
  failures.committed();
  EXPECT_NO_THROW(failures.settle(departures));
  EXPECT_NO_THROW(fail_all_but_the_last());
}

TEST_F(FailedGenerationsTest, CountAGenerationOnce) {
  fail();
  for (int count = 0; count < 20; ++count) EXPECT_NO_THROW(failures.settle(departures));
}

TEST(LateLimit, IsLongerThanAStep) {
  EXPECT_EQ(late_limit(std::chrono::seconds(3)), std::chrono::seconds(4));
  EXPECT_EQ(late_limit(Duration::max()), Duration::max());
  EXPECT_EQ(late_limit(Duration::max() - Duration(1)), Duration::max());
}

TEST(LeftGeneration, IsATimeoutIfTheRankGaveUpWaiting) {
  const Error left = left_generation(
      2, 7, std::make_exception_ptr(Error(ErrorKind::kTimedOut, "rank 1 made no vote in 3 s")));
  EXPECT_EQ(left.kind(), ErrorKind::kTimedOut) << "no rank has died";
  EXPECT_EQ(left.message(), "rank 2 left generation 7: timed out: rank 1 made no vote in 3 s");
}

TEST(LeftGeneration, IsADisconnectionElse) {
  const Error dead =
      left_generation(0, 3, std::make_exception_ptr(Error(ErrorKind::kDisconnected, "worker1 died")));
  EXPECT_EQ(dead.kind(), ErrorKind::kDisconnected);
  const Error failed = left_generation(0, 3, std::make_exception_ptr(std::runtime_error("no such file")));
  EXPECT_EQ(failed.kind(), ErrorKind::kDisconnected);
  EXPECT_EQ(failed.message(), "rank 0 left generation 3: no such file");
}

TEST(LeftTraining, IsADisconnectionAlsoIfTheProgramFailedWithATimeout) {
  const Error left = left_training(
      1, 4, std::make_exception_ptr(Error(ErrorKind::kTimedOut, "the database did not answer")));
  EXPECT_EQ(left.kind(), ErrorKind::kDisconnected) << "the rank does not return";
  EXPECT_EQ(left.message(), "rank 1 left generation 4: timed out: the database did not answer");
}

}  // namespace

}  // namespace torchspan::elastic::failed_generations_test
