#include "autograd/survey.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::autograd::survey_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

WaitingSend waiting_send() {
  return {.message = 0x2a, .call = "embed", .site = "train.cpp:7", .reply = true, .to = "trainer"};
}

/// Two workers at rest: one sent a gradient, the other got it and waits for another one.
std::vector<PartReport> at_rest() {
  return {{.worker = "trainer", .executed = 3, .sent = 1},
          {.worker = "server", .executed = 2, .received = 1, .waiting = {waiting_send()}}};
}

TEST(Survey, StandsStillWhenTwoInARowAreQuietAndAlike) {
  const Survey first(at_rest()), second(at_rest());
  EXPECT_TRUE(second.stands_still_since(first));
  EXPECT_THAT(second.waiting,
              AllOf(HasSubstr("worker 'server' sent the result of 'embed'"),
                    HasSubstr("to worker 'trainer' as message 0x2a"), HasSubstr("called at train.cpp:7")));
}

TEST(Survey, OneIsNotEnough) { EXPECT_FALSE(Survey(at_rest()).stands_still_since(Survey())); }

/// A quiet answer of each worker, but from different moments: in between a gradient went by.
TEST(Survey, DoesNotTrustTwoRestsBetweenWhichSomethingHappened) {
  auto ran = at_rest(), told = at_rest();
  ran[1].executed += 1;
  told[0].sent += 1;
  told[1].received += 1;
  for (const auto& later : {ran, told}) {
    ASSERT_TRUE(Survey(later).quiet);
    EXPECT_FALSE(Survey(later).stands_still_since(Survey(at_rest())));
  }
}

TEST(Survey, IsNotQuietWhileSomebodyWorksOrDoesNotAnswerOrAGradientIsUnderWay) {
  auto busy = at_rest(), silent = at_rest(), under_way = at_rest();
  busy[0].busy = true;
  silent[0].silent = true;
  under_way[1].received = 0;
  for (const auto& parts : {busy, silent, under_way}) {
    EXPECT_FALSE(Survey(parts).stands_still_since(Survey(parts)));
    EXPECT_FALSE(Survey(parts).stands_still_since(Survey(at_rest())));
    EXPECT_FALSE(Survey(at_rest()).stands_still_since(Survey(parts)));
  }
  EXPECT_THAT(Survey(busy).at_work, HasSubstr("worker 'trainer' is still at work"));
  EXPECT_THAT(Survey(silent).waiting, HasSubstr("worker 'trainer' does not answer"));
}

/// Whoever waits for nothing is about to end.
TEST(Survey, IsNotQuietWhenNobodyWaitsForGradients) {
  auto parts = at_rest();
  parts[1].waiting.clear();
  EXPECT_FALSE(Survey(parts).stands_still_since(Survey(parts)));
}

}  // namespace
}  // namespace torchspan::autograd::survey_test
