#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "launch/supervisor/endings.h"

namespace torchspan::launch::interruption_test {
namespace {

struct Step {
  int signal;
  Reaction reaction;
  int noted;  ///< the interruption's signal afterwards
};

void expect_steps(const std::vector<Step>& steps, int preempt_signal = SIGUSR1) {
  Interruption state;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(react(state, steps[i].signal, preempt_signal), steps[i].reaction) << "step " << i;
    EXPECT_EQ(state.signal, steps[i].noted) << "step " << i;
  }
}

TEST(Interruption, ByCtrlCStopsThenKills) {
  expect_steps({{SIGINT, Reaction::kStop, SIGINT}, {SIGINT, Reaction::kKill, SIGINT}});
  expect_steps({{SIGHUP, Reaction::kStop, SIGHUP}, {SIGTERM, Reaction::kKill, SIGHUP}});
}

TEST(Interruption, BySigtermPreemptsThenKills) {
  expect_steps({{SIGTERM, Reaction::kPreempt, SIGTERM}, {SIGTERM, Reaction::kKill, SIGTERM}});
}

/// A batch system sends one to the launchers of all hosts and to all workers, which report it.
TEST(Interruption, ByASignalThatOthersGotTooIsOne) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const Reaction first = signal == SIGTERM ? Reaction::kPreempt : Reaction::kStop;
    Interruption others_first;
    EXPECT_EQ(react(others_first, signal, SIGUSR1, true), first);
    EXPECT_EQ(react(others_first, signal, SIGUSR1, true), Reaction::kNone);
    EXPECT_EQ(react(others_first, signal, SIGUSR1), Reaction::kNone);
    EXPECT_EQ(react(others_first, signal, SIGUSR1, true), Reaction::kNone);
    EXPECT_EQ(react(others_first, signal, SIGUSR1), Reaction::kKill);
    Interruption own_first;
    EXPECT_EQ(react(own_first, signal, SIGUSR1), first);
    EXPECT_EQ(react(own_first, signal, SIGUSR1, true), Reaction::kNone);
    EXPECT_EQ(react(own_first, signal, SIGUSR1), Reaction::kKill);
  }
  Interruption later;  // SIGTERM after the preemption signal
  EXPECT_EQ(react(later, SIGUSR1, SIGUSR1, true), Reaction::kPreempt);
  EXPECT_EQ(react(later, SIGTERM, SIGUSR1, true), Reaction::kPreempt);
  EXPECT_EQ(react(later, SIGUSR1, SIGUSR1), Reaction::kNone);
  EXPECT_EQ(react(later, SIGTERM, SIGUSR1), Reaction::kNone);
  EXPECT_EQ(react(later, SIGTERM, SIGUSR1), Reaction::kKill);
}

TEST(Interruption, ByThePreemptionSignalIsForwardedOnceAndSigtermMayFollow) {
  expect_steps({{SIGUSR1, Reaction::kPreempt, SIGUSR1},
                {SIGUSR1, Reaction::kNone, SIGUSR1},
                {SIGTERM, Reaction::kPreempt, SIGTERM},
                {SIGUSR1, Reaction::kNone, SIGTERM},
                {SIGTERM, Reaction::kKill, SIGTERM}});
}

TEST(Interruption, ByCtrlCStopsAPreemptedJob) {
  expect_steps({{SIGUSR1, Reaction::kPreempt, SIGUSR1},
                {SIGINT, Reaction::kStop, SIGINT},
                {SIGINT, Reaction::kKill, SIGINT}});
}

TEST(Interruption, UsesTheChosenSignal) {
  expect_steps({{SIGHUP, Reaction::kPreempt, SIGHUP}, {SIGHUP, Reaction::kNone, SIGHUP}}, SIGHUP);
  expect_steps({{SIGTERM, Reaction::kPreempt, SIGTERM}, {SIGTERM, Reaction::kKill, SIGTERM}}, SIGTERM);
}

TEST(Interruption, OfAnyKindIsNotedAndForwardedAtMostTwice) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int job = 0; job < 500; ++job) {
    Interruption state;
    int forwarded = 0, stopped = 0;
    for (int i = 0; i < 8; ++i) {
      const int signal = std::vector{SIGUSR1, SIGTERM, SIGINT, SIGHUP}[random() % 4];
      const Reaction reaction = react(state, signal, SIGUSR1);
      ASSERT_NE(state.signal, 0);
      const bool begins = reaction == Reaction::kPreempt || reaction == Reaction::kStop;
      ASSERT_TRUE(begins || i > 0);
      ASSERT_TRUE(signal != SIGUSR1 || i == 0 || reaction == Reaction::kNone);
      forwarded += reaction == Reaction::kPreempt;
      stopped += reaction == Reaction::kStop;
      ASSERT_EQ(state.preemption, stopped == 0);
    }
    ASSERT_LE(forwarded, 2);
    ASSERT_LE(stopped, 1);
  }
}

}  // namespace
}  // namespace torchspan::launch::interruption_test
