#include "autograd/contexts/context_queries.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::autograd::context_queries_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

WaitingSend waiting_send() {
  return {.message = 0x2a, .call = "embed", .site = "train.cpp:7", .reply = true, .to = "trainer"};
}

/// Two idle workers: one sent a gradient, the other received it and waits for another one.
std::vector<PartReport> idle_workers() {
  return {{.worker = "trainer", .executed = 3, .sent = 1},
          {.worker = "server", .executed = 2, .received = 1, .waiting = {waiting_send()}}};
}

TEST(StallSurvey, ReportsAStallAfterTwoEqualQuietSurveys) {
  const StallSurvey first(idle_workers()), second(idle_workers());
  EXPECT_TRUE(second.is_stalled_since(first));
  EXPECT_THAT(second.waiting,
              AllOf(HasSubstr("worker 'server' sent the result of 'embed'"),
                    HasSubstr("to worker 'trainer' as message 0x2a"), HasSubstr("called at train.cpp:7")));
}

TEST(StallSurvey, ReportsNoStallAfterOneSurvey) {
  EXPECT_FALSE(StallSurvey(idle_workers()).is_stalled_since(StallSurvey()));
}

/// Each worker was idle when it answered, but a gradient was sent between the answers.
TEST(StallSurvey, ReportsNoStallIfSomethingChangedBetweenTwoQuietSurveys) {
  auto ran = idle_workers(), messaged = idle_workers();
  ran[1].executed += 1;
  messaged[0].sent += 1;
  messaged[1].received += 1;
  for (const auto& later : {ran, messaged}) {
    ASSERT_TRUE(StallSurvey(later).quiet);
    EXPECT_FALSE(StallSurvey(later).is_stalled_since(StallSurvey(idle_workers())));
  }
}

TEST(StallSurvey, IsNotQuietWhileAWorkerIsBusyOrSilentOrAGradientIsInFlight) {
  auto busy = idle_workers(), silent = idle_workers(), in_flight = idle_workers();
  busy[0].busy = true;
  silent[0].silent = true;
  in_flight[1].received = 0;
  for (const auto& parts : {busy, silent, in_flight}) {
    EXPECT_FALSE(StallSurvey(parts).is_stalled_since(StallSurvey(parts)));
    EXPECT_FALSE(StallSurvey(parts).is_stalled_since(StallSurvey(idle_workers())));
    EXPECT_FALSE(StallSurvey(idle_workers()).is_stalled_since(StallSurvey(parts)));
  }
  EXPECT_THAT(StallSurvey(busy).at_work, HasSubstr("worker 'trainer' is still running nodes"));
  EXPECT_THAT(StallSurvey(silent).waiting, HasSubstr("worker 'trainer' does not answer"));
}

/// A worker that waits for nothing is about to end its part.
TEST(StallSurvey, IsNotQuietWhenNoSendWaitsForGradients) {
  auto parts = idle_workers();
  parts[1].waiting.clear();
  EXPECT_FALSE(StallSurvey(parts).is_stalled_since(StallSurvey(parts)));
}

}  // namespace
}  // namespace torchspan::autograd::context_queries_test
