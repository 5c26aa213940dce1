#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>

#include "rendezvous/simulated_world.h"

namespace torchspan::rendezvous::membership_test {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Every rank joins with the options that `change` has modified, and is rejected. Returns the errors by rank.
std::vector<Error> refusals(SimulatedWorld& world,
                            const std::function<void(int, MembershipOptions&)>& change) {
  std::vector<Error> errors(static_cast<std::size_t>(world.size()), Error(ErrorKind::kInvalid, ""));
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank);
    change(rank, options);
    errors[static_cast<std::size_t>(rank)] = error_of([&] { world.join(rank, options); });
  });
  return errors;
}

class Seeded : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, Seeded, ::testing::Range<std::uint64_t>(1, 9));

TEST_P(Seeded, AllWorkersJoinAndLeave) {
  SimulatedWorld world(GetParam(), 16, {.jitter = milliseconds(3)});
  world.run([&](int rank) {
    auto& executor = world.executor();
    executor.sleep(milliseconds(executor.random() % 2000));
    const auto membership = world.join(rank);
    ASSERT_EQ(membership->world_size(), 16);
    EXPECT_EQ(membership->self().rank, rank);
    for (int other = 0; other < 16; ++other) {
      const Member member = membership->member(other);
      EXPECT_EQ(member.rank, other);
      EXPECT_EQ(member.name, "worker" + std::to_string(other));
      EXPECT_EQ(member.address, "sim:worker" + std::to_string(other));
      EXPECT_EQ(member.instance, 1000u + static_cast<std::uint64_t>(other));
      EXPECT_EQ(membership->member(member.name).rank, other);
      EXPECT_TRUE(membership->is_present(other));
    }
    int deaths = 0;
    membership->on_death([&](const Member&, const Error&) { ++deaths; });
    membership->barrier("end", {}, world.in(seconds(10)));
    membership->leave(world.in(seconds(10)));
    EXPECT_EQ(deaths, 0);
  });
}

// peer: c10d testBarrier
TEST_P(Seeded, NoWorkerPassesABarrierBeforeAllArrive) {
  SimulatedWorld world(GetParam(), 5, {.jitter = milliseconds(1)});
  std::vector<int> arrived(20, 0);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    for (std::size_t round = 0; round < arrived.size(); ++round) {
      world.executor().sleep(microseconds(world.executor().random() % 5000));
      ++arrived[round];
      membership->barrier("round", {}, world.in(seconds(10)));
      EXPECT_EQ(arrived[round], 5);
    }
    membership->leave(world.in(seconds(10)));
  });
}

TEST_P(Seeded, GathersTheBytesOfAllRanksAndOfSubsets) {
  SimulatedWorld world(GetParam(), 6, {.jitter = milliseconds(1)});
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    const std::vector<int> mine = rank % 2 == 0 ? std::vector<int>{4, 0, 2} : std::vector<int>{5, 3, 1};
    for (int round = 0; round < 10; ++round) {
      const Bytes bytes = {static_cast<std::byte>(rank), static_cast<std::byte>(round)};
      const auto all = membership->all_gather_bytes("halves", bytes, mine, world.in(seconds(10)));
      ASSERT_EQ(all.size(), 3u);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(all[i], (Bytes{static_cast<std::byte>(2 * i + static_cast<std::size_t>(rank % 2)),
                                 static_cast<std::byte>(round)}));
      }
    }
    membership->leave(world.in(seconds(10)));
  });
}

TEST_P(Seeded, AllOthersAreNotifiedOfAKilledWorker) {
  SimulatedWorld world(GetParam(), 8);
  const int victim = 1 + static_cast<int>(GetParam() % 7);
  TimePoint killed;
  std::map<int, TimePoint> heard;
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    membership->on_death([&, rank](const Member& member, const Error& reason) {
      EXPECT_EQ(member.rank, victim);
      EXPECT_EQ(reason.kind(), ErrorKind::kDisconnected);
      EXPECT_TRUE(heard.emplace(rank, world.executor().now()).second);
    });
    if (rank == victim) {
      world.executor().sleep(seconds(1));
      killed = world.executor().now();
      world.kill(rank);
      return;
    }
    const Error error = error_of([&] { membership->barrier("b", {}, world.in(seconds(100))); });
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker" + std::to_string(victim)), HasSubstr("barrier 'b'")));
    EXPECT_FALSE(membership->is_present(victim));
    membership->barrier(
        "survivors",
        [&] {
          std::vector<int> ranks;
          for (int other = 0; other < 8; ++other) {
            if (other != victim) ranks.push_back(other);
          }
          return ranks;
        }(),
        world.in(seconds(10)));
    membership->leave(world.in(seconds(10)));
  });
  EXPECT_EQ(heard.size(), 7u);
  for (const auto& [rank, at] : heard) EXPECT_LT(at - killed, milliseconds(1)) << "rank " << rank;
}

TEST_P(Seeded, AllOthersAreNotifiedOfTheStoresDeath) {
  SimulatedWorld world(GetParam(), 5);
  TimePoint killed;
  std::map<int, TimePoint> heard;
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 0) {
      world.executor().sleep(seconds(1));
      killed = world.executor().now();
      world.kill(0);
      return;
    }
    membership->on_death([&, rank](const Member& member, const Error&) {
      EXPECT_EQ(member.rank, 0);
      heard[rank] = world.executor().now();
    });
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Error error = error_of([&] { membership->barrier("b", {}, world.in(seconds(100))); });
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
      EXPECT_THAT(error.what(), HasSubstr("worker0 (rank 0"));
    }
    EXPECT_FALSE(membership->is_present(0));
    membership->leave(world.in(seconds(10)));
  });
  EXPECT_EQ(heard.size(), 4u);
  for (const auto& [rank, at] : heard) EXPECT_LT(at - killed, milliseconds(1)) << "rank " << rank;
}

TEST(Membership, WaitsForARankZeroThatStartsLater) {
  SimulatedWorld world(1, 3);
  world.run([&](int rank) {
    if (rank == 0) world.executor().sleep(seconds(8));
    const auto membership = world.join(rank);
    EXPECT_EQ(membership->world_size(), 3);
    EXPECT_LT(world.executor().now().time_since_epoch(), seconds(9));
    membership->leave(world.in(seconds(1)));
  });
}

TEST(Membership, NamesTheMissingRanksAtTheDeadline) {
  SimulatedWorld world(2, 4);
  world.run([&](int rank) {
    if (rank == 2) return;
    const Error error = error_of([&] { world.join(rank); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("missing: rank 2;"), HasSubstr("3 of 4"),
                                    HasSubstr("worker0 (rank 0"), HasSubstr("worker3 (rank 3")));
    EXPECT_EQ(error.worker(), "worker" + std::to_string(rank));
    const auto now = world.executor().now().time_since_epoch();
    EXPECT_GE(now, seconds(10));
    EXPECT_LT(now, milliseconds(10100));
  });
}

TEST(Membership, ReportsThatRankZeroNeverStarted) {
  SimulatedWorld world(3, 2);
  world.run([&](int rank) {
    if (rank == 0) return;
    const Error error = error_of([&] { world.join(rank); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("sim:store"), HasSubstr("10 s"), HasSubstr("MASTER_ADDR")));
    EXPECT_EQ(world.executor().now().time_since_epoch(), seconds(10));
  });
}

// Once rank 0 had given up, its refusals hid why it could not be reached before.
TEST(Membership, ReportsWhyRankZeroCouldNotBeReachedBeforeItEnded) {
  SimulatedWorld world(3, 2);
  world.run([&](int rank) {
    if (rank == 0) {
      world.network().cut("member1", "store");
      MembershipOptions options = world.options(0);
      options.timeout = seconds(7);
      EXPECT_THAT(error_of([&] { world.join(0, options); }).what(), HasSubstr("only 1 of 2 workers joined"));
      return world.network().heal("member1", "store");
    }
    const Error error = error_of([&] { world.join(1); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("no worker listens at 'sim:store'"),
                      HasSubstr("before that: 'sim:store' did not finish the handshake in time")));
  });
}

TEST(Membership, NamesBothWorkersOfOneNameOnEveryRank) {
  SimulatedWorld world(4, 4);
  const auto errors = refusals(world, [&](int rank, MembershipOptions& options) {
    if (rank == 3) world.executor().sleep(seconds(1));  // is rejected, too
    if (rank == 2) options.name = "worker1";
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("two workers are named 'worker1'"),
                                    HasSubstr("worker1 (rank 1, pid"), HasSubstr("worker1 (rank 2, pid")));
  }
}

TEST(Membership, NamesBothWorkersOfOneRankOnEveryRank) {
  SimulatedWorld world(5, 3);
  const auto errors = refusals(world, [&](int rank, MembershipOptions& options) {
    if (rank == 2) options.rank = 1;
  });
  for (const Error& error : errors) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("two workers have rank 1"), HasSubstr("worker1 (rank 1"),
                                    HasSubstr("worker2 (rank 1")));
  }
}

TEST(Membership, NamesTheWorldSizeOfEachWorkerOnEveryRank) {
  SimulatedWorld world(6, 3);
  const auto errors = refusals(world, [&](int rank, MembershipOptions& options) {
    if (rank == 2) options.world_size = 4;
  });
  for (const Error& error : errors) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker2 (rank 2"), HasSubstr("WORLD_SIZE is 4"),
                                    HasSubstr("rank 0 says 3")));
  }
}

TEST(Membership, ListsDifferingFunctionsOnEveryRank) {
  SimulatedWorld world(7, 3);
  const auto errors = refusals(world, [&](int rank, MembershipOptions& options) {
    options.functions = {"f()"};
    if (rank == 1) {
      options.functions.push_back("g(int)");
      options.functions_digest = 1;
    }
  });
  for (const Error& error : errors) EXPECT_THAT(error.what(), HasSubstr("has g(int)"));
}

TEST(Membership, AllowsDifferingFunctionsWhenAsked) {
  SimulatedWorld world(8, 2);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank);
    options.functions_digest = static_cast<std::uint64_t>(rank);
    options.require_same_functions = false;
    const auto membership = world.join(rank, options);
    EXPECT_EQ(membership->member(1).functions_digest, 1u);
    membership->leave(world.in(seconds(1)));
  });
}

TEST(Membership, FailsAllWorkersWhenOneDiesBeforeTheWorldIsComplete) {
  SimulatedWorld world(9, 3);
  world.run([&](int rank) {
    if (rank == 2) {
      world.executor().sleep(seconds(1));
      world.kill(1);
      return;
    }
    const Error error = error_of([&] { world.join(rank); });
    if (rank == 0) {
      EXPECT_THAT(error.what(), HasSubstr("worker1 (rank 1"));
    }
  });
}

TEST(Membership, RejectsAWorkerOfAnotherJob) {
  SimulatedWorld world(10, 3);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank == 2 ? 1 : rank);
    options.world_size = 2;
    if (rank == 2) {
      options.job = "other";
      EXPECT_THAT(error_of([&] { world.join(rank, options); }).what(),
                  AllOf(HasSubstr("'other'"), HasSubstr("'job'"), HasSubstr("MASTER_PORT")));
      return;
    }
    world.join(rank, options)->leave(world.in(seconds(1)));
  });
}

TEST(Membership, RejectsWorkersAfterTheWorldIsComplete) {
  SimulatedWorld world(11, 3);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank == 2 ? 1 : rank);
    options.world_size = 2;
    if (rank == 2) {
      world.executor().sleep(seconds(1));
      EXPECT_THAT(error_of([&] { world.join(rank, options); }).what(), HasSubstr("is complete"));
      return;
    }
    const auto membership = world.join(rank, options);
    world.executor().sleep(seconds(2));
    EXPECT_TRUE(membership->is_present(1 - rank));
    membership->leave(world.in(seconds(1)));
  });
}

TEST(Membership, EndingWithoutGoodbyeIsADeath) {
  SimulatedWorld world(12, 2);
  world.run([&](int rank) {
    auto membership = world.join(rank);
    if (rank == 1) {
      world.executor().sleep(seconds(1));
      return;
    }
    int deaths = 0;
    const auto parker = world.executor().make_parker();
    membership->on_death([&](const Member& member, const Error&) {
      EXPECT_EQ(member.name, "worker1");
      ++deaths;
      parker->unpark();
    });
    EXPECT_TRUE(parker->park(world.in(seconds(5))));
    EXPECT_EQ(deaths, 1);
    membership->leave(world.in(seconds(1)));
  });
}

TEST(Membership, LateListenersAreNotifiedOfEarlierDeaths) {
  SimulatedWorld world(15, 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 2) return;
    world.executor().sleep(seconds(1));
    std::vector<std::string> first, second;
    membership->on_death([&](const Member& member, const Error&) { first.push_back(member.name); });
    membership->on_death([&](const Member& member, const Error&) { second.push_back(member.name); });
    world.executor().sleep(seconds(1));
    EXPECT_EQ(first, std::vector<std::string>{"worker2"});
    EXPECT_EQ(second, std::vector<std::string>{"worker2"});
    membership->leave(world.in(seconds(1)));
  });
}

TEST(Membership, CallbacksMayThrowButMustNotWait) {
  SimulatedWorld world(16, 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 2) return;
    bool called = false;
    membership->on_death([&](const Member&, const Error&) {
      EXPECT_EQ(error_of([&] { membership->barrier("b", {}, Deadline::never()); }).kind(),
                ErrorKind::kInvalid);
      EXPECT_EQ(error_of([&] { membership->leave(Deadline::never()); }).kind(), ErrorKind::kInvalid);
      called = true;
      throw std::runtime_error("thrown on purpose");
    });
    world.executor().sleep(seconds(1));
    EXPECT_TRUE(called);
    membership->barrier("two", {0, 1}, world.in(seconds(1)));
    membership->leave(world.in(seconds(1)));
  });
}

TEST(Membership, NamesTheRanksThatABarrierMisses) {
  SimulatedWorld world(18, 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    if (rank == 2) world.executor().sleep(seconds(3));
    const Error error = error_of([&] { membership->barrier("b", {}, world.in(seconds(1))); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    const char* who = rank == 2 ? "without this worker, worker2 (rank 2" : "without worker2 (rank 2";
    EXPECT_THAT(error.what(), AllOf(HasSubstr(who), HasSubstr("there: worker0"), HasSubstr("barrier 'b'")));
    membership->barrier("b", {}, world.in(seconds(10)));
    membership->leave(world.in(seconds(10)));
  });
}

TEST(Membership, RejectsInvalidOptionsBeforeItConnects) {
  SimulatedWorld world(19, 2);
  world.run([&](int rank) {
    for (const char* name : {"", "two words", "späte"}) {
      MembershipOptions options = world.options(rank);
      options.name = name;
      EXPECT_EQ(error_of([&] { world.join(rank, options); }).kind(), ErrorKind::kInvalid);
    }
    MembershipOptions options = world.options(rank);
    options.rank = 2;
    EXPECT_THAT(error_of([&] { world.join(rank, options); }).what(), HasSubstr("rank is 2"));
    options.world_size = -1;
    EXPECT_THAT(error_of([&] { world.join(rank, options); }).what(), HasSubstr("world_size is -1"));
    const auto membership = world.join(rank);
    const Deadline never;
    EXPECT_THAT(error_of([&] { membership->member("worker7"); }).what(),
                AllOf(HasSubstr("'worker7'"), HasSubstr("worker0, worker1")));
    EXPECT_THAT(error_of([&] { membership->member(2); }).what(), HasSubstr("0 to 1"));
    EXPECT_THAT(error_of([&] { membership->is_present(-1); }).what(), HasSubstr("-1"));
    EXPECT_THAT(error_of([&] { membership->barrier("b", {1 - rank}, never); }).what(),
                HasSubstr("not among"));
    EXPECT_THAT(error_of([&] { membership->barrier("b", {rank, 9}, never); }).what(), HasSubstr("no rank 9"));
    EXPECT_THAT(error_of([&] { membership->barrier("", {}, never); }).what(), HasSubstr("the tag"));
    EXPECT_THAT(error_of([&] { membership->all_gather_bytes("g", Bytes(70000), {}, never); }).what(),
                HasSubstr("70000"));
    membership->leave(world.in(seconds(10)));
  });
}

TEST(Membership, OfOneWorkerNeedsNoNetwork) {
  SimulatedWorld world(20, 1);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    EXPECT_EQ(membership->world_size(), 1);
    EXPECT_EQ(membership->member("worker0").rank, 0);
    membership->on_death([](const Member&, const Error&) { FAIL(); });
    membership->barrier("b", {}, Deadline::never());
    EXPECT_EQ(membership->all_gather_bytes("g", Bytes{std::byte{5}}, {0}, Deadline::never()),
              (std::vector<Bytes>{{std::byte{5}}}));
    EXPECT_THROW(membership->barrier("b", {1}, Deadline::never()), Error);
    membership->leave(Deadline::never());
    EXPECT_THROW(membership->barrier("b", {}, Deadline::never()), Error);
  });
  EXPECT_EQ(world.network().counters().sent, 0u);
}

TEST(Membership, WorkersThatWaitToJoinSayForWhom) {
  const auto logged = [](int late) {
    SimulatedWorld world(33, 3);
    ::testing::internal::CaptureStderr();
    world.run([&](int rank) {
      Runtime runtime(world.executor(), "worker" + std::to_string(rank));
      MembershipOptions options = world.options(rank);
      options.timeout = seconds(60);
      if (rank == late) world.executor().sleep(seconds(25));
      const auto membership = Membership::join(runtime, world.transports(rank), options);
      membership->leave(world.in(seconds(10)));
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string of_rank0 = logged(2);
  EXPECT_THAT(of_rank0,
              HasSubstr("[worker0] warning: rank 0 waits for these ranks to join: 2; there: worker0"));
  EXPECT_EQ(std::count(of_rank0.begin(), of_rank0.end(), '\n'), 2) << of_rank0;
  const std::string of_others = logged(0);
  for (const char* worker : {"[worker1]", "[worker2]"}) {
    for (const char* waited : {"10 s", "20 s"}) {
      EXPECT_THAT(of_others, HasSubstr(std::string(worker) + " warning: this worker has waited " + waited +
                                       " for rank 0 at sim:store: "));
    }
  }
  EXPECT_EQ(std::count(of_others.begin(), of_others.end(), '\n'), 4) << of_others;
}

TEST_P(Seeded, TheDeathOfAWorkerThatFollowsAnotherNamesBoth) {
  SimulatedWorld world(GetParam(), 4, {.jitter = milliseconds(1)});
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    Mutex mutex;
    std::map<int, std::string> deaths;
    membership->on_death([&](const Member& member, const Error& reason) {
      MutexLock lock(mutex);
      deaths[member.rank] = reason.message();
    });
    membership->barrier("all", {}, world.in(seconds(10)));
    const auto has = [&](int dead) {
      MutexLock lock(mutex);
      return deaths.contains(dead);
    };
    if (rank == 1) return world.kill(1);
    while (!has(1)) world.executor().sleep(milliseconds(1));
    if (rank == 2) return world.kill(2);
    const Error error = error_of([&] { membership->barrier("end", {0, 2, 3}, world.in(seconds(10))); });
    EXPECT_THAT(error.message(), AllOf(HasSubstr("worker2 (rank 2"), HasSubstr("; worker1 (rank 1"),
                                       HasSubstr("had died before it")));
    while (!has(2)) world.executor().sleep(milliseconds(1));
    EXPECT_THAT(deaths[1], Not(HasSubstr("before it")));
    EXPECT_THAT(deaths[2], AllOf(HasSubstr("worker2 (rank 2"), HasSubstr("; worker1 (rank 1"),
                                 HasSubstr("had died before it")));
    if (rank == 0) {
      world.executor().sleep(milliseconds(100));  // what it has sent arrives
      return world.kill(0);
    }
    while (!has(0)) world.executor().sleep(milliseconds(1));
    EXPECT_THAT(deaths[0], AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("; worker1 (rank 1")));
  });
}

TEST(Membership, ADeathLongAfterAnotherIsItsOwn) {
  SimulatedWorld world(34, 3);
  world.run([&](int rank) {
    const auto membership = world.join(rank);
    membership->barrier("all", {}, world.in(seconds(10)));
    if (rank != 0) {
      world.executor().sleep(seconds(rank == 1 ? 1 : 7));
      return world.kill(rank);
    }
    const auto end_of = [&](int other) {
      return error_of([&] {
               membership->barrier("with" + std::to_string(other), {0, other}, world.in(seconds(10)));
             })
          .message();
    };
    EXPECT_THAT(end_of(1), HasSubstr("worker1 (rank 1"));
    EXPECT_THAT(end_of(2), AllOf(HasSubstr("worker2 (rank 2"), Not(HasSubstr("worker1"))));
    membership->leave(world.in(seconds(10)));
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::membership_test
