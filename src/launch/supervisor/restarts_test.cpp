#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include <torchspan/core/error.h>

#include "launch/supervisor/endings.h"

namespace torchspan::launch::restarts_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::HasSubstr;

AttemptResult failure(int workers, Duration ran, int code = 1) {
  return {.workers = workers, .started = workers, .ran = ran, .code = code};
}

TEST(Restarts, AreLimited) {
  const RestartPolicy policy{.most = 2};
  std::vector<AttemptResult> attempts = {failure(4, minutes(1))};
  EXPECT_EQ(next_attempt(policy, {4, 4}, attempts).workers, 4);
  attempts.push_back(failure(4, minutes(1)));
  EXPECT_EQ(next_attempt(policy, {4, 4}, attempts).workers, 4);
  attempts.push_back(failure(4, minutes(1)));
  const NextAttempt end = next_attempt(policy, {4, 4}, attempts);
  EXPECT_EQ(end.workers, 0);
  EXPECT_THAT(end.reason, HasSubstr("no restart is left (--max-restarts 2)"));
}

TEST(Restarts, AreOffByDefaultWithoutAWord) {
  const NextAttempt end = next_attempt({}, {4, 4}, {failure(4, minutes(1))});
  EXPECT_EQ(end.workers, 0);
  EXPECT_EQ(end.reason, "");
}

TEST(Restarts, DoNotHelpAProgramThatCannotBeRun) {
  for (const int code : {126, 127}) {
    const NextAttempt end = next_attempt({.most = 5}, {1, 4}, {failure(4, seconds(0), code)});
    EXPECT_EQ(end.workers, 0);
    EXPECT_THAT(end.reason, HasSubstr("cannot be run"));
  }
  AttemptResult killed = failure(4, seconds(0), 0);
  killed.signal = SIGKILL;
  EXPECT_EQ(next_attempt({.most = 5}, {4, 4}, {killed}).workers, 4);
}

TEST(Restarts, EndWhenOneFailureRepeatsAtOnce) {
  const RestartPolicy policy{.most = 100, .give_up_after = 3};
  const auto quick = failure(4, seconds(2), 5);
  EXPECT_EQ(next_attempt(policy, {4, 4}, {quick, quick}).workers, 4);
  const NextAttempt end = next_attempt(policy, {4, 4}, {quick, quick, quick});
  EXPECT_EQ(end.workers, 0);
  EXPECT_THAT(end.reason,
              HasSubstr("the last 3 attempts failed within 10 s of their start with exit code 5"));
  EXPECT_EQ(next_attempt(policy, {4, 4}, {quick, failure(4, seconds(2), 6), quick}).workers, 4);
  EXPECT_EQ(next_attempt(policy, {4, 4}, {quick, failure(4, kAtOnce, 5), quick}).workers, 4);
  EXPECT_EQ(next_attempt({.most = 100, .give_up_after = 0}, {4, 4}, {quick, quick, quick}).workers, 4);
}

TEST(Restarts, WaitTwiceAsLongAfterEachFailureUpToALimit) {
  const RestartPolicy policy{.most = 100, .backoff = seconds(3), .longest_backoff = seconds(20)};
  std::vector<AttemptResult> attempts;
  for (const int expected : {3, 6, 12, 20, 20}) {
    attempts.push_back(failure(2, seconds(30)));
    EXPECT_EQ(next_attempt(policy, {2, 2}, attempts).delay, seconds(expected)) << attempts.size();
  }
}

TEST(Restarts, ForgetEarlierFailuresAfterALongAttempt) {
  const RestartPolicy policy{.most = 100, .backoff = seconds(3), .longest_backoff = seconds(20)};
  std::vector<AttemptResult> attempts(5, failure(2, seconds(30)));
  attempts.push_back(failure(2, policy.healthy_after));
  EXPECT_EQ(next_attempt(policy, {2, 2}, attempts).delay, seconds(3));
  attempts.push_back(failure(2, seconds(30)));
  EXPECT_EQ(next_attempt(policy, {2, 2}, attempts).delay, seconds(6));
}

TEST(Restarts, ContinueWithFewerWorkersWhenNoneIsLeft) {
  const RestartPolicy policy{.most = 1};
  std::vector<AttemptResult> attempts = {failure(4, minutes(1))};
  std::vector<int> sizes = {4};
  while (sizes.size() < 10) {
    const NextAttempt next = next_attempt(policy, {2, 4}, attempts);
    sizes.push_back(next.workers);
    if (next.workers == 0) {
      EXPECT_THAT(next.reason, HasSubstr("fewer than 2 workers are not allowed"));
      break;
    }
    attempts.push_back(failure(next.workers, minutes(1)));
  }
  EXPECT_THAT(sizes, ::testing::ElementsAre(4, 4, 3, 2, 0));
}

TEST(Restarts, ContinueWithAllWorkersAfterALongAttemptWithFewer) {
  const RestartPolicy policy{.most = 2, .give_up_after = 2};
  std::vector<AttemptResult> attempts = {failure(4, seconds(1)), failure(4, seconds(1))};
  EXPECT_EQ(next_attempt(policy, {2, 4}, attempts).workers, 3) << "it failed at once, twice";
  attempts.push_back(failure(3, policy.healthy_after - seconds(1)));
  EXPECT_EQ(next_attempt(policy, {2, 4}, attempts).workers, 3) << "it did not run for long enough";
  attempts.back().ran = policy.healthy_after;
  const NextAttempt all = next_attempt(policy, {2, 4}, attempts);
  EXPECT_EQ(all.workers, 4);
  EXPECT_THAT(all.reason, HasSubstr("the last attempt ran for 300 s"));
  attempts.push_back(failure(4, minutes(1)));
  EXPECT_EQ(next_attempt(policy, {2, 4}, attempts).workers, 3)
      << "two restarts, this one included, are used up";
}

TEST(Restarts, ContinueWithTheWorkersThatCouldBeStarted) {
  AttemptResult partly = failure(8, seconds(0));
  partly.started = 5;
  const NextAttempt next = next_attempt({}, {2, 8}, {partly});
  EXPECT_EQ(next.workers, 5);
  EXPECT_THAT(next.reason, HasSubstr("only 5 of 8 workers could be started"));
  EXPECT_EQ(next_attempt({}, {6, 8}, {partly}).workers, 7) << "tries one less while that is allowed";
  EXPECT_EQ(next_attempt({}, {8, 8}, {partly}).workers, 0);
}

/// Random jobs that always fail, against counters that a person would keep.
TEST(Restarts, FollowTheirRulesInRandomJobs) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int job = 0; job < 2000; ++job) {
    const WorkerRange range{1 + static_cast<int>(random() % 4), 4 + static_cast<int>(random() % 4)};
    const RestartPolicy policy{.most = static_cast<int>(random() % 5),
                               .backoff = milliseconds(random() % 3000),
                               .longest_backoff = milliseconds(1000 + random() % 5000),
                               .healthy_after = seconds(40),
                               .give_up_after = static_cast<int>(random() % 4)};
    std::vector<AttemptResult> attempts;
    int left = policy.most, streak = 0;
    double wait = to_seconds(policy.backoff);
    for (int workers = range.most; workers > 0;) {
      const auto attempt = failure(workers, seconds(random() % 60), 1 + static_cast<int>(random() % 2));
      const bool same = !attempts.empty() && streak > 0 && attempts.back().workers == workers &&
                        attempts.back().code == attempt.code;
      streak = attempt.ran >= kAtOnce ? 0 : same ? streak + 1 : 1;
      wait = attempts.empty() || attempt.ran >= policy.healthy_after ? to_seconds(policy.backoff) : wait * 2;
      attempts.push_back(attempt);
      const NextAttempt next = next_attempt(policy, range, attempts);
      const bool give_up = policy.give_up_after > 0 && policy.most > 0 && streak >= policy.give_up_after;
      const int smaller = workers > range.least ? workers - 1 : 0;
      const int again = attempt.ran >= policy.healthy_after ? range.most : workers;
      ASSERT_EQ(next.workers, left > 0 && !give_up ? again : smaller);
      if (next.workers >= workers) --left;
      if (next.workers > 0) {
        ASSERT_NEAR(to_seconds(next.delay), std::min(wait, to_seconds(policy.longest_backoff)), 1e-6);
      }
      const int shrinks =
          (1 + policy.most) * (range.most - range.least);  // after each restart with all workers
      ASSERT_LE(attempts.size(), static_cast<std::size_t>(1 + policy.most + shrinks));
      workers = next.workers;
    }
  }
}

TEST(WorkerNumbers, AreOneOrARange) {
  EXPECT_EQ(parse_workers("3", "-n").least, 3);
  EXPECT_EQ(parse_workers("3", "-n").most, 3);
  EXPECT_EQ(parse_workers("2:4", "-n").least, 2);
  EXPECT_EQ(parse_workers("2:4", "-n").most, 4);
  EXPECT_EQ(parse_workers("4096", "-n").most, kMostWorkers);
  for (const char* text :
       {"", "0", "-1", "4097", "2:", ":2", "4:2", "0:2", "1:2:3", "two", "2 ", " 2", "99999999999"}) {
    EXPECT_THROW(parse_workers(text, "-n"), Error) << text;
  }
}

}  // namespace
}  // namespace torchspan::launch::restarts_test
