#include <gtest/gtest.h>

#include "rendezvous/store/roster.h"

namespace torchspan::rendezvous::heartbeats_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Ids = std::vector<std::uint64_t>;

constexpr TimePoint kStart{};

TEST(Heartbeats, AskEveryIntervalAndDeclareDeathAfterSilence) {
  Heartbeats beats({.interval = milliseconds(500), .dead_after = seconds(2)});
  EXPECT_TRUE(beats.next_deadline().is_never());
  beats.watch(7, kStart);
  for (int beat = 0; beat < 4; ++beat) {
    const TimePoint now = kStart + beat * milliseconds(500);
    EXPECT_EQ(beats.next_deadline(), Deadline(now));
    EXPECT_EQ(beats.tick(now).ask, Ids{7});
    EXPECT_TRUE(beats.tick(now + milliseconds(499)).ask.empty());
  }
  const auto due = beats.tick(kStart + seconds(2));
  EXPECT_EQ(due.dead, Ids{7});
  EXPECT_TRUE(due.ask.empty());
  EXPECT_TRUE(beats.next_deadline().is_never());
}

TEST(Heartbeats, CountSilenceFromTheFirstUnansweredQuestion) {
  Heartbeats beats({.interval = milliseconds(500), .dead_after = seconds(2)});
  beats.watch(1, kStart);
  beats.watch(2, kStart);
  beats.tick(kStart);
  beats.heard(1);
  beats.heard(2);
  // The store was suspended for a minute: no worker is declared dead because of that, but both are asked.
  const TimePoint late = kStart + seconds(60);
  auto due = beats.tick(late);
  EXPECT_TRUE(due.dead.empty());
  EXPECT_EQ(due.ask, (Ids{1, 2}));
  beats.heard(1);
  EXPECT_EQ(beats.tick(late + seconds(2)).dead, Ids{2});
}

TEST(Heartbeats, DeclareNoDeathIfTheLimitExceedsTheClock) {
  Heartbeats beats({.interval = milliseconds(500), .dead_after = Duration::max()});
  const TimePoint now = kStart + seconds(60);
  beats.watch(7, now);
  EXPECT_EQ(beats.tick(now).ask, Ids{7});
  EXPECT_EQ(beats.next_deadline(), Deadline(now + milliseconds(500)));
  EXPECT_TRUE(beats.tick(now + milliseconds(500)).dead.empty());
}

TEST(Heartbeats, ForgetDepartedWorkersAndIgnoreUnknownConnections) {
  Heartbeats beats({});
  beats.watch(1, kStart);
  beats.heard(9);
  beats.forget(1);
  beats.forget(9);
  EXPECT_TRUE(beats.tick(kStart + seconds(100)).ask.empty());
}

TEST(Heartbeats, ReportTheSilenceInSeconds) {
  EXPECT_EQ(silence_text(seconds(5)),
            "silent for 5.0 s (no heartbeat); its process is stopped, or its host or the network is down");
}

}  // namespace
}  // namespace torchspan::rendezvous::heartbeats_test
