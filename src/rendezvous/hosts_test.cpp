#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>

#include "rendezvous/simulated_world.h"

namespace torchspan::rendezvous::hosts_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A world in which every worker is on a different host.
class Hosts : public SimulatedWorld {
 public:
  using SimulatedWorld::SimulatedWorld;
  MembershipOptions options(int rank) const {
    MembershipOptions options = SimulatedWorld::options(rank);
    options.host_id = "host" + std::to_string(rank);
    options.heartbeat = milliseconds(500);
    options.dead_after = seconds(5);
    return options;
  }
  std::unique_ptr<Membership> join(int rank) { return SimulatedWorld::join(rank, options(rank)); }
  std::string of(int rank) const { return "member" + std::to_string(rank); }
  Duration time() { return executor().now().time_since_epoch(); }
};

class HostsOfSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, HostsOfSeed, ::testing::Range<std::uint64_t>(1, 9));

TEST_P(HostsOfSeed, AVanishedHostIsDeclaredDeadInTimeAndTheOthersContinue) {
  Hosts world(GetParam(), 4, {.jitter = milliseconds(1)});
  std::map<int, Duration> heard;
  Duration cut{};
  world.run([&](int rank) {
    auto& executor = world.executor();
    const auto membership = world.join(rank);
    membership->on_death([&, rank](const Member& member, const Error& reason) {
      if (rank == 3 && heard.contains(3)) {
        EXPECT_EQ(member.rank, 3) << "its own death, as the others see it, is the last event";
        return;
      }
      if (rank == 3) {
        EXPECT_EQ(member.rank, 0);
        EXPECT_THAT(reason.message(), AllOf(HasSubstr("silent for 5.0 s (no heartbeat)"),
                                            HasSubstr("the other workers consider this one dead")));
      } else {
        EXPECT_EQ(member.rank, 3);
        EXPECT_EQ(reason.message(), describe(member) +
                                        " died: silent for 5.0 s (no heartbeat); its process is stopped, or "
                                        "its host or the network is down");
      }
      EXPECT_TRUE(heard.emplace(rank, world.time()).second);
    });
    membership->barrier("in", {}, world.in(seconds(5)));
    if (rank == 3) {
      executor.sleep(milliseconds(10000 + executor.random() % 1000));
      cut = world.time();
      world.network().cut("store", world.of(3));
      executor.sleep(seconds(8));
      world.network().heal("store", world.of(3));
      executor.sleep(seconds(5));
      EXPECT_FALSE(membership->is_present(0));
      EXPECT_THAT(error_of([&] {
                    membership->barrier("b", {0, 3}, Deadline::never());
                  }).what(),
                  HasSubstr("silent for 5.0 s"));
      membership->leave(world.in(seconds(5)));
      return;
    }
    const Error error = error_of([&] { membership->barrier("all", {}, world.in(seconds(100))); });
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker3 (rank 3"), HasSubstr("silent for 5.0 s")));
    for (int round = 0; round < 5; ++round) {
      executor.sleep(seconds(2));
      membership->barrier("rest", {0, 1, 2}, world.in(seconds(5)));
      EXPECT_FALSE(membership->is_present(3));
    }
    EXPECT_EQ(membership->condition(3), Condition::kDead);
    membership->leave(world.in(seconds(5)));
  });
  ASSERT_EQ(heard.size(), 4u);
  for (const auto& [rank, at] : heard) {
    EXPECT_GT(at - cut, milliseconds(4400)) << "rank " << rank;
    EXPECT_LT(at - cut, milliseconds(5510)) << "rank " << rank;
  }
}

TEST_P(HostsOfSeed, AShortOutageHasNoEffect) {
  Hosts world(GetParam(), 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    membership->watch({.died = [](const Member& member, const Error& reason) {
      ADD_FAILURE() << describe(member) << ": " << reason.what();
    }});
    if (rank == 1) {
      for (int cut = 0; cut < 5; ++cut) {
        world.executor().sleep(milliseconds(world.executor().random() % 2000));
        world.network().cut("store", world.of(2));
        world.executor().sleep(milliseconds(4400));
        world.network().heal("store", world.of(2));
        world.executor().sleep(milliseconds(1));
      }
    }
    membership->barrier("b", {}, world.in(seconds(100)));
    membership->leave(world.in(seconds(5)));
  });
}

TEST(HostsOfAWorld, AVanishedRankZeroIsDeclaredDeadInTime) {
  Hosts world(1, 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 0) {
      world.executor().sleep(seconds(3));
      for (int other : {1, 2}) world.network().cut("store", world.of(other));
      world.executor().sleep(seconds(20));
      EXPECT_FALSE(membership->is_present(1));
      EXPECT_FALSE(membership->is_present(2));
      return;
    }
    const Error error = error_of([&] { membership->barrier("b", {}, Deadline::never()); });
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("silent for 5.0 s")));
    EXPECT_LT(world.time(), seconds(9));
  });
}

TEST(HostsOfAWorld, AWorkerThatIsDeclaredDeadIsNotified) {
  Hosts world(2, 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank != 2) {
      error_of([&] { membership->barrier("b", {}, world.in(seconds(60))); });
      membership->leave(world.in(seconds(5)));
      return;
    }
    // The network drops what this worker sends, but delivers what it receives.
    world.network().block([](const net::SimMessage& message) { return message.from == "sim:member2"; });
    std::vector<std::pair<int, std::string>> deaths;
    membership->on_death([&](const Member& member, const Error& reason) {
      deaths.emplace_back(member.rank, reason.message());
    });
    const Error error = error_of([&] { membership->barrier("b", {}, Deadline::never()); });
    world.executor().sleep(milliseconds(1));
    EXPECT_EQ(deaths, (std::vector<std::pair<int, std::string>>{{0, error.message()}, {2, error.message()}}));
    EXPECT_TRUE(membership->is_present(2)) << "it is alive";
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("declared this worker dead"),
                                    HasSubstr("silent for 5.0 s"), HasSubstr("restart this worker")));
    EXPECT_FALSE(membership->is_present(0));
    world.network().unblock();
    world.executor().sleep(seconds(10));
    membership->leave(world.in(seconds(5)));
  });
}

TEST(HostsOfAWorld, ALostWorkerRejoinsAsANewIncarnation) {
  Hosts world(3, 2);
  world.run([&](int rank) {
    auto membership = world.join(rank);
    if (rank == 0) {
      std::vector<std::uint32_t> ends, arrivals;
      membership->watch(
          {.joined = [&](const Member& member) { arrivals.push_back(member.incarnation); },
           .died = [&](const Member& member, const Error&) { ends.push_back(member.incarnation); }});
      world.executor().sleep(seconds(30));
      EXPECT_EQ(ends, std::vector<std::uint32_t>{0});
      EXPECT_EQ(arrivals, std::vector<std::uint32_t>{1});
      membership->barrier("again", {}, world.in(seconds(5)));
      membership->leave(world.in(seconds(5)));
      return;
    }
    world.executor().sleep(seconds(2));
    world.network().cut("store", world.of(1));
    world.executor().sleep(seconds(10));
    membership.reset();
    world.network().heal("store", world.of(1));
    world.executor().sleep(seconds(1));
    membership = world.join(1);
    EXPECT_EQ(membership->self().incarnation, 1u);
    membership->barrier("again", {}, world.in(seconds(60)));
    membership->leave(world.in(seconds(5)));
  });
}

TEST(HostsOfAWorld, NothingIsSentBetweenIdleWorkersOfOneHost) {
  SimulatedWorld world(4, 3);
  std::uint64_t sent = 0;
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    world.executor().sleep(seconds(1));
    if (rank == 0) sent = world.network().counters().sent;
    world.executor().sleep(seconds(1000));
    if (rank == 0) {
      EXPECT_EQ(world.network().counters().sent, sent);
    }
    world.executor().sleep(seconds(1));
    membership->leave(world.in(seconds(5)));
  });
}

TEST(HostsOfAWorld, InvalidHeartbeatsAreRejected) {
  Hosts world(5, 1);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank);
    options.heartbeat = Duration::zero();
    EXPECT_THAT(error_of([&] { world.SimulatedWorld::join(0, options); }).what(),
                HasSubstr("heartbeat is 0 s"));
    options.heartbeat = seconds(3);
    EXPECT_THAT(error_of([&] { world.SimulatedWorld::join(0, options); }).what(),
                HasSubstr("dead_after 5 s"));
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::hosts_test
