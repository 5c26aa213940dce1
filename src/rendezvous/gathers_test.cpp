// Gathers whose results callbacks get.
#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "rendezvous/simulated_world.h"

namespace torchspan::rendezvous::gathers_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class GathersOfSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, GathersOfSeed, ::testing::Range<std::uint64_t>(1, 9));

/// The result of a gather that calls back.
struct CalledBack {
  int times = 0;
  std::vector<Bytes> all = {};
  std::optional<Error> failure = {};
};
Membership::GatherCallback into(CalledBack& result) {
  return [&result](std::vector<Bytes> all, std::optional<Error> failure) {
    ++result.times;
    result.all = std::move(all);
    result.failure = std::move(failure);
  };
}

TEST_P(GathersOfSeed, GathersThatCallBackMeetThoseThatWait) {
  SimulatedWorld world(GetParam(), 4, {.jitter = milliseconds(1)});
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    const Bytes mine = {static_cast<std::byte>(rank)};
    CalledBack first, second;
    if (rank % 2 == 0) {
      // A callback may begin the next round, and use the membership.
      membership->all_gather_bytes_async(
          "g", mine, {}, Deadline::never(), [&](std::vector<Bytes> all, std::optional<Error> failure) {
            EXPECT_FALSE(failure);
            EXPECT_EQ(membership->members().size(), 4U);
            into(first)(std::move(all), std::move(failure));
            membership->all_gather_bytes_async("g", mine, {}, world.in(seconds(10)), into(second));
          });
      while (second.times == 0) world.executor().sleep(milliseconds(1));
    } else {
      into(first)(membership->all_gather_bytes("g", mine, {}, world.in(seconds(10))), std::nullopt);
      into(second)(membership->all_gather_bytes("g", mine, {}, world.in(seconds(10))), std::nullopt);
    }
    for (const CalledBack& result : {first, second}) {
      EXPECT_EQ(result.times, 1);
      ASSERT_EQ(result.all.size(), 4U);
      for (int other = 0; other < 4; ++other) {
        EXPECT_EQ(result.all[static_cast<std::size_t>(other)], Bytes{static_cast<std::byte>(other)});
      }
    }
    membership->leave(world.in(seconds(10)));
    EXPECT_EQ(first.times + second.times, 2);
  });
}

TEST_P(GathersOfSeed, GathersThatCallBackEndOnceWithTheReason) {
  SimulatedWorld world(GetParam(), 4);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    membership->barrier("all", {}, world.in(seconds(10)));
    if (rank == 3) return world.kill(rank);
    CalledBack dead, late, left, ended;
    const auto begin = [&](const std::string& tag, std::vector<int> ranks, Deadline deadline,
                           CalledBack& into_this) {
      membership->all_gather_bytes_async(tag, {}, std::move(ranks), deadline, into(into_this));
    };
    begin("dead", {rank, 3}, Deadline::never(), dead);
    const int silent = (rank + 1) % 3;
    begin("late" + std::to_string(rank), {rank, silent}, world.in(milliseconds(200)), late);
    begin("left" + std::to_string(rank), {rank, silent}, Deadline::never(), left);
    while (dead.times == 0 || late.times == 0) world.executor().sleep(milliseconds(1));
    ASSERT_TRUE(dead.failure && late.failure);
    EXPECT_EQ(dead.failure->kind(), ErrorKind::kDisconnected) << dead.failure->what();
    EXPECT_THAT(dead.failure->what(), AllOf(HasSubstr("worker3"), HasSubstr("all_gather 'dead'")));
    EXPECT_EQ(late.failure->kind(), ErrorKind::kTimedOut) << late.failure->what();
    EXPECT_THAT(late.failure->what(), HasSubstr("worker" + std::to_string(silent)));
    EXPECT_EQ(left.times, 0);
    membership->barrier("end", {0, 1, 2}, world.in(seconds(10)));
    membership->leave(world.in(seconds(10)));
    EXPECT_EQ(dead.times + late.times, 2);
    EXPECT_EQ(left.times, 1);
    ASSERT_TRUE(left.failure);
    EXPECT_TRUE(left.failure->kind() == ErrorKind::kCancelled ||
                left.failure->kind() == ErrorKind::kDisconnected)
        << left.failure->what();
    const Error error = error_of([&] { begin("over", {rank, silent}, Deadline::never(), ended); });
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
    EXPECT_EQ(ended.times, 0);
  });
}

/// Runs a world of four whose membership has a log; returns the log's lines.
std::string logged_by(SimulatedWorld& world, const std::function<void(int, Runtime&, Membership&)>& body) {
  ::testing::internal::CaptureStderr();
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank));
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    body(rank, runtime, *membership);
    membership->leave(world.in(seconds(10)));
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST_P(GathersOfSeed, WaitsOfManySecondsAreListedAndNameTheRanksThatAreMissing) {
  SimulatedWorld world(GetParam(), 4, {.jitter = milliseconds(1)});
  const std::string log = logged_by(world, [&](int rank, Runtime& runtime, Membership& membership) {
    if (rank == 1 || rank == 3) {
      world.executor().sleep(seconds(45));
      return membership.barrier("checkpoint.save", {}, world.in(seconds(60)));
    }
    const Thread observer = world.executor().spawn("observer", [&] {
      world.executor().sleep(milliseconds(500));
      EXPECT_TRUE(runtime.spans.open().empty());
      world.executor().sleep(seconds(2));
      const auto open = runtime.spans.open();
      ASSERT_EQ(open.size(), 1U);
      EXPECT_EQ(open[0].name, "barrier 'checkpoint.save'");
    });
    membership.barrier("checkpoint.save", {}, world.in(seconds(60)));
    EXPECT_TRUE(runtime.spans.open().empty());
  });
  for (const int waited : {10, 20, 40}) {
    EXPECT_THAT(log, HasSubstr("barrier 'checkpoint.save' has waited " + std::to_string(waited) +
                               " s for worker1 (rank 1"));
  }
  EXPECT_THAT(log, AllOf(HasSubstr(", worker3 (rank 3"), HasSubstr("torchspan stacks")));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 3) << "one rank warns\n" << log;
}

TEST_P(GathersOfSeed, TheFirstRankThatWaitsWarns) {
  SimulatedWorld world(GetParam(), 4);
  const std::string log = logged_by(world, [&](int rank, Runtime&, Membership& membership) {
    if (rank == 0) world.executor().sleep(seconds(15));
    membership.all_gather_bytes("made", {}, {}, world.in(seconds(60)));
  });
  EXPECT_THAT(log, HasSubstr("[worker1] warning: all_gather 'made' has waited 10 s for worker0 (rank 0"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST(Gathers, AWaitNamesAStoreThatDoesNotAnswer) {
  SimulatedWorld world(21, 2);
  const std::string log = logged_by(world, [&](int rank, Runtime&, Membership& membership) {
    if (rank == 0) return world.executor().sleep(seconds(45));
    world.network().cut("member1", "store");
    const Error error = error_of([&] { membership.barrier("lost", {}, world.in(seconds(35))); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
    world.network().heal("member1", "store");
  });
  EXPECT_THAT(log, AllOf(HasSubstr("[worker1] warning: barrier 'lost' has waited 20 s: worker0 (rank 0"),
                         HasSubstr("which serves the store, does not answer")));
}

TEST(Gathers, OfOneWorkerCallBackAtOnce) {
  SimulatedWorld world(20, 1);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    CalledBack result;
    membership->all_gather_bytes_async("g", Bytes{std::byte{5}}, {0}, Deadline::never(), into(result));
    EXPECT_EQ(result.times, 1);
    EXPECT_EQ(result.all, (std::vector<Bytes>{{std::byte{5}}}));
    const Error error = error_of(
        [&] { membership->all_gather_bytes_async("g", Bytes(70000), {0}, Deadline::never(), into(result)); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
    EXPECT_EQ(result.times, 1);
    membership->leave(Deadline::never());
  });
}

TEST_P(GathersOfSeed, GathersOfTagsThatAreUsedOnceMeetInAnyOrder) {
  SimulatedWorld world(GetParam(), 3, {.jitter = milliseconds(1)});
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    const Bytes mine = {static_cast<std::byte>(rank)};
    std::vector<CalledBack> results(50);
    for (std::size_t i = 0; i < results.size(); ++i) {
      // Ranks ask in different orders.
      const std::size_t number = rank == 1 ? results.size() - 1 - i : i;
      membership->all_gather_bytes_once("once." + std::to_string(number), mine, {}, into(results[number]));
    }
    while (std::ranges::any_of(results, [](const CalledBack& result) { return result.times == 0; })) {
      world.executor().sleep(milliseconds(1));
    }
    for (const CalledBack& result : results) {
      EXPECT_EQ(result.times, 1);
      ASSERT_EQ(result.all.size(), 3U);
      EXPECT_EQ(result.all[2], Bytes{std::byte{2}});
    }
    membership->leave(world.in(seconds(10)));
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::gathers_test
