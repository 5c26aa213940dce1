#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include "launch/supervisor/endings.h"

namespace torchspan::launch::replacements_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Optional;

constexpr TimePoint kStart{};

Ending death(int rank, Duration ran = minutes(1), int code = 1) {
  return {.rank = rank, .name = "worker" + std::to_string(rank), .pid = 100 + rank, .code = code, .ran = ran};
}

TEST(Replacements, AreOffByDefaultWithoutAWord) {
  Replacements none({}, 0);
  EXPECT_THAT(none.plan({death(1)}, kStart), Optional(std::string()));
  EXPECT_FALSE(none.waiting());
  EXPECT_TRUE(none.next().is_never());
}

TEST(Replacements, StartWhenTheirTimeHasComeAndOnce) {
  Replacements some({.backoff = seconds(2), .most_replacements = 5}, 0);
  EXPECT_EQ(some.plan({death(2), death(4)}, kStart), std::nullopt);
  EXPECT_TRUE(some.waiting());
  EXPECT_EQ(some.next(), Deadline(kStart + seconds(2)));
  EXPECT_EQ(some.start_of(4), kStart + seconds(2));
  EXPECT_THAT(some.take_due(kStart + seconds(2) - milliseconds(1)), IsEmpty());
  EXPECT_THAT(some.take_due(kStart + seconds(2)), ElementsAre(2, 4));
  EXPECT_THAT(some.take_due(kStart + seconds(3)), IsEmpty());
  EXPECT_FALSE(some.waiting());
  EXPECT_EQ(some.incarnation(2), 1);
  EXPECT_EQ(some.incarnation(3), 0);
  EXPECT_EQ(some.used(), 2);
}

TEST(Replacements, AreLimitedForAllWorkersAndAttemptsTogether) {
  Replacements some({.most_replacements = 4}, 2);
  EXPECT_EQ(some.plan({death(1)}, kStart), std::nullopt);
  EXPECT_THAT(some.plan({death(2), death(3)}, kStart),
              Optional(HasSubstr("no replacement is left (--max-replacements 4)")))
      << "all of one event, or none";
  EXPECT_EQ(some.used(), 3);
  EXPECT_EQ(some.plan({death(2)}, kStart), std::nullopt);
  EXPECT_NE(some.plan({death(1)}, kStart), std::nullopt);
}

TEST(Replacements, AreRefusedForRankZeroAndForProgramsThatCannotBeRun) {
  Replacements some({.most_replacements = 100}, 0);
  EXPECT_THAT(some.plan({death(1), death(0)}, kStart), Optional(HasSubstr("worker0 is rank 0")));
  EXPECT_THAT(some.plan({death(3, seconds(0), 127)}, kStart), Optional(HasSubstr("worker3: exit code 127")));
  EXPECT_EQ(some.used(), 0);
  EXPECT_FALSE(some.waiting());
}

TEST(Replacements, WaitLongerForARankThatFailsAgain) {
  Replacements some(
      {.backoff = seconds(3), .longest_backoff = seconds(10), .give_up_after = 0, .most_replacements = 100},
      0);
  for (const int expected : {3, 6, 10, 10}) {
    EXPECT_EQ(some.plan({death(1, seconds(30))}, kStart), std::nullopt);
    EXPECT_EQ(some.start_of(1), kStart + seconds(expected));
  }
  EXPECT_EQ(some.plan({death(2, seconds(30))}, kStart), std::nullopt);
  EXPECT_EQ(some.start_of(2), kStart + seconds(3)) << "each rank has its own delay";
  EXPECT_EQ(some.plan({death(1, minutes(5))}, kStart), std::nullopt);
  EXPECT_EQ(some.start_of(1), kStart + seconds(3)) << "a long life resets it";
}

TEST(Replacements, GiveUpWhenOneFailureRepeatsAtOnce) {
  Replacements some({.give_up_after = 3, .most_replacements = 100}, 0);
  EXPECT_EQ(some.plan({death(1, seconds(1), 5)}, kStart), std::nullopt);
  EXPECT_EQ(some.plan({death(2, seconds(1), 5)}, kStart), std::nullopt);
  EXPECT_EQ(some.plan({death(1, seconds(1), 5)}, kStart), std::nullopt);
  EXPECT_THAT(some.plan({death(1, seconds(1), 5)}, kStart),
              Optional(HasSubstr("worker1: the last 3 attempts failed within 10 s")));
  EXPECT_EQ(some.plan({death(1, seconds(1), 6)}, kStart), std::nullopt);
}

TEST(Replacements, EndWithTheJob) {
  Replacements some({.most_replacements = 100}, 0);
  EXPECT_EQ(some.plan({death(3), death(1)}, kStart), std::nullopt);
  EXPECT_THAT(some.stop(), ElementsAre(1, 3));
  EXPECT_FALSE(some.waiting());
  EXPECT_THAT(some.take_due(kStart + minutes(10)), IsEmpty());
  EXPECT_THAT(some.stop(), IsEmpty());
  EXPECT_THAT(some.plan({death(2)}, kStart), Optional(std::string()));
}

}  // namespace
}  // namespace torchspan::launch::replacements_test
