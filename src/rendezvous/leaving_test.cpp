// How members leave a world without dying, and what happens to workers that wait or connect meanwhile.
#include <array>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "rendezvous/simulated_world.h"

namespace torchspan::rendezvous::leaving_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

void expect_no_death(Membership& membership) {
  membership.on_death(
      [](const Member& member, const Error&) { ADD_FAILURE() << describe(member) << " died"; });
}

TEST(Leaving, AGoodbyeIsADepartureAndRankZeroServesUntilTheLast) {
  SimulatedWorld world(13, 4);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    std::vector<int> left;
    expect_no_death(*membership);
    membership->on_departure([&](const Member& member) { left.push_back(member.rank); });
    world.executor().sleep(seconds(rank));
    if (rank == 3) {
      EXPECT_EQ(left, (std::vector<int>{0, 1, 2}));
      EXPECT_FALSE(membership->is_present(0));
      const Error error = error_of([&] { membership->barrier("b", {2, 3}, world.in(seconds(1))); });
      EXPECT_THAT(error.what(), HasSubstr("worker2 (rank 2"));
      EXPECT_THAT(error.what(), HasSubstr("left the world"));
    }
    membership->leave(world.in(seconds(10)));
    EXPECT_EQ(error_of([&] { membership->barrier("b", {}, Deadline::never()); }).kind(),
              ErrorKind::kCancelled);
    membership->leave(world.in(seconds(10)));
    const auto now = world.executor().now().time_since_epoch();
    EXPECT_LT(now, seconds(rank == 0 ? 3 : rank) + milliseconds(100));
    if (rank == 0) {
      EXPECT_GE(now, seconds(3));
    }
  });
}

TEST(Leaving, RankZeroNamesTheMembersThatItWaitsFor) {
  SimulatedWorld world(13, 3);
  ::testing::internal::CaptureStderr();
  world.run([&](int rank) {
    auto options = world.options(rank);
    Runtime runtime(world.executor(), options.name, rank == 0 ? LogLevel::kWarning : LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), options);
    membership->barrier("all", {}, world.in(seconds(1)));
    world.executor().sleep(seconds(rank == 2 ? 45 : 0));
    membership->leave(world.in(seconds(60)));
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("these have not left yet: worker2 (rank 2"));
  EXPECT_THAT(log, Not(HasSubstr("worker1")));
  std::size_t times = 0;
  for (std::size_t at = log.find("not left yet"); at != std::string::npos;
       at = log.find("not left yet", at + 1))
    ++times;
  EXPECT_EQ(times, 3u);
}

/// The worker connects before or after rank 0 has left, while other workers are still present.
TEST(Leaving, AWorkerThatConnectsDuringShutdownJoinsTheNextJob) {
  for (const auto& stays : {std::array{1, 0, 2}, std::array{0, 1, 2}, std::array{2, 1, 0}}) {
    SimulatedWorld world(15, 3);
    world.run([&](int rank) {
      for (int round = 0; round < 3; ++round) {
        const auto membership = world.join(rank);
        expect_no_death(*membership);
        membership->barrier("here", {}, world.in(seconds(1)));
        EXPECT_TRUE(membership->is_present((rank + 1) % 3));
        world.executor().sleep(seconds(stays[static_cast<std::size_t>(rank)]));
        membership->leave(world.in(seconds(10)));
      }
      EXPECT_LT(world.executor().now().time_since_epoch(), seconds(9));
    });
  }
}

TEST(Leaving, RankZeroStopsServingAtItsDeadline) {
  SimulatedWorld world(14, 2);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 0) {
      membership->leave(world.in(seconds(2)));
      EXPECT_LT(world.executor().now().time_since_epoch(), milliseconds(2100));
      return;
    }
    expect_no_death(*membership);
    world.executor().sleep(seconds(5));
    const Error error = error_of([&] { membership->barrier("b", {1}, Deadline::never()); });
    EXPECT_THAT(error.what(), AllOf(HasSubstr("store closed"), HasSubstr("worker0")));
    membership->leave(world.in(seconds(2)));
  });
}

TEST(Leaving, LeavingDoesNotWaitForADeadStore) {
  SimulatedWorld world(21, 2);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 0) {
      world.executor().sleep(seconds(2));
      world.kill(0);
      return;
    }
    world.executor().sleep(seconds(1));
    world.network().drop_if([](const net::SimMessage& message) { return message.to == "sim:member1"; });
    membership->leave(world.in(seconds(1000)));
    EXPECT_LT(world.executor().now().time_since_epoch(), seconds(3));
  });
}

/// A callback may refer to the membership until it is destroyed.
TEST(Leaving, DestroysTheCallbacksHoweverTheMembershipEnds) {
  for (const int size : {1, 2}) {
    for (const std::string how : {"leave", "give_up", "destruction"}) {
      SCOPED_TRACE(how + " of " + std::to_string(size));
      SimulatedWorld world(18, size);
      world.run([&](int rank) {
        auto membership = world.join(rank);
        Membership& mine = *membership;
        int departed = 0;
        const auto watch = [&] {
          const std::shared_ptr<int> held(&departed, [&mine, rank](int* count) {
            EXPECT_EQ(mine.self().rank, rank) << "the membership still answers";
            ++*count;
          });
          mine.watch({.left = [held](const Member&) {}});
        };
        watch();
        EXPECT_EQ(departed, 0);
        if (how == "leave") mine.leave(world.in(seconds(5)));
        if (how == "give_up") mine.give_up("left because of a test");
        if (how != "destruction") {
          EXPECT_EQ(departed, 1);
          watch();
          EXPECT_EQ(departed, 2) << "callbacks that are added late are destroyed immediately";
        }
        membership.reset();
        EXPECT_EQ(departed, how == "destruction" ? 1 : 2);
      });
    }
  }
}

TEST(Leaving, DestructionCancelsOtherThreadsBarriersBeforeTheCallbacksGo) {
  SimulatedWorld world(19, 2);
  world.run([&](int rank) {
    auto membership = world.join(rank);
    if (rank == 1) {
      world.executor().sleep(seconds(2));
      return membership->leave(world.in(seconds(5)));
    }
    Thread waiter = world.executor().spawn("waiter", [&, &mine = *membership] {
      const Error error = error_of([&] { mine.barrier("b", {}, Deadline::never()); });
      EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    });
    membership->watch({.left = [held = std::shared_ptr<Thread>(
                                    &waiter, [](Thread* thread) { thread->join(); })](const Member&) {}});
    world.executor().sleep(seconds(1));
    membership.reset();
  });
}

TEST(Leaving, LeavingEndsOtherThreadsBarriers) {
  SimulatedWorld world(17, 2);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 0) {
      Thread waiter = world.executor().spawn("waiter", [&] {
        const Error error = error_of([&] { membership->barrier("b", {}, Deadline::never()); });
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
      });
      world.executor().sleep(seconds(1));
      membership->leave(world.in(seconds(5)));
      return;
    }
    world.executor().sleep(seconds(2));
    membership->leave(world.in(seconds(5)));
  });
}

TEST(Leaving, DeathsThatFollowAnotherOneAreOneWarning) {
  constexpr int kSize = 24;
  SimulatedWorld world(23, kSize);
  ::testing::internal::CaptureStderr();
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank),
                    rank == 1 ? LogLevel::kWarning : LogLevel::kOff);
    auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    world.executor().sleep(seconds(1));
    if (rank == 2) world.kill(2);
    world.executor().sleep(milliseconds(300));
    if (rank >= 4) world.kill(rank);
    world.executor().sleep(seconds(1));
    if (rank != 2 && rank < 4) membership->leave(world.in(seconds(5)));
  });
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  const auto count = [&](const std::string& text) {
    int found = 0;
    for (auto at = warnings.find(text); at != std::string::npos; at = warnings.find(text, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("worker2 (rank 2"), 1) << warnings;
  EXPECT_EQ(count(" died: its process ended without a goodbye"), 1) << warnings;
  EXPECT_EQ(count("more workers died less than 5 s later"), 1) << warnings;
}

}  // namespace
}  // namespace torchspan::rendezvous::leaving_test
