#include "elastic/training/failed_generations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
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

}  // namespace
}  // namespace torchspan::elastic::failed_generations_test
