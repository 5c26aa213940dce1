// peer: rpc_test.py dynamic_and_static_init_rpc_together: same: rejected, naming both types of world
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <set>

#include "rendezvous/simulated_world.h"

namespace torchspan::rendezvous::open_world_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Options of a worker of an open world; number 0 is rank 0.
MembershipOptions visitor(const SimulatedWorld& world, int number, int rank = kAnyRank) {
  MembershipOptions options = world.options(number);
  options.world_size = kOpenWorld;
  options.rank = number == 0 ? 0 : rank;
  options.instance = 0;
  return options;
}

/// The events that one worker received: "+worker1.0" (joined), "!worker1.0" (died), "-worker1.0" (left).
class Diary {
 public:
  explicit Diary(Membership& membership) {
    membership.watch({.joined = [this](const Member& member) { add("+", member); },
                      .died = [this](const Member& member, const Error&) { add("!", member); },
                      .left = [this](const Member& member) { add("-", member); }});
  }
  std::vector<std::string> lines;

 private:
  void add(const char* sign, const Member& member) {
    lines.push_back(sign + member.name + "." + std::to_string(member.incarnation));
  }
};

class OpenWorld : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, OpenWorld, ::testing::Range<std::uint64_t>(1, 9));

TEST_P(OpenWorld, WorkersJoinLeaveAndRejoin) {
  SimulatedWorld world(GetParam(), 3, {.jitter = milliseconds(3)});
  world.run([&](int number) {
    auto& executor = world.executor();
    if (number == 0) {
      const auto membership = world.join(0, visitor(world, 0));
      EXPECT_EQ(executor.now().time_since_epoch() / seconds(1), 0) << "rank 0 does not wait";
      EXPECT_TRUE(membership->open());
      EXPECT_EQ(membership->world_size(), 1);
      EXPECT_FALSE(membership->is_present(1));
      EXPECT_THAT(error_of([&] { membership->member(1); }).what(), HasSubstr("no rank 1"));
      Diary diary(*membership);
      executor.sleep(seconds(20));
      EXPECT_THAT(diary.lines, ElementsAre("+worker1.0", "+worker2.0", "!worker1.0", "+worker1.1",
                                           "-worker2.0", "-worker1.1"));
      EXPECT_EQ(membership->world_size(), 3);
      EXPECT_EQ(membership->member("worker1").incarnation, 1u);
      EXPECT_EQ(membership->condition(1), Condition::kLeft);
      membership->leave(world.in(seconds(5)));
      return;
    }
    executor.sleep(seconds(number));
    auto membership = world.join(number, visitor(world, number));
    EXPECT_EQ(membership->self().rank, number);
    EXPECT_EQ(membership->world_size(), number + 1);
    if (number == 1) {
      executor.sleep(seconds(4));
      membership.reset();
      executor.sleep(seconds(1));
      membership = world.join(number, visitor(world, number));
      EXPECT_EQ(membership->self().rank, 1);
      EXPECT_EQ(membership->self().incarnation, 1u);
      EXPECT_EQ(membership->member(1).instance, membership->self().instance);
    }
    executor.sleep(seconds(number == 1 ? 9 : 6));
    EXPECT_EQ(membership->is_present(2), number == 2);
    membership->leave(world.in(seconds(5)));
  });
}

TEST_P(OpenWorld, AWorkerWhoseConnectionBreaksBeforeItsWelcomeJoinsAsAnotherInstance) {
  SimulatedWorld world(GetParam(), 2);
  world.run([&](int number) {
    auto& executor = world.executor();
    if (number == 1) {
      executor.sleep(seconds(1));
      const auto membership = world.join(1, visitor(world, 1, 1));
      EXPECT_EQ(membership->self().incarnation, 1u);
      EXPECT_EQ(membership->self().instance, membership->member(1).instance);
      executor.sleep(seconds(3));
      membership->leave(world.in(seconds(5)));
      return;
    }
    const auto membership = world.join(0, visitor(world, 0));
    std::vector<std::uint64_t> joined, died;
    membership->watch({.joined = [&](const Member& member) { joined.push_back(member.instance); },
                       .died = [&](const Member& member, const Error&) { died.push_back(member.instance); }});
    world.network().block([](const net::SimMessage& message) { return message.to == "sim:member1"; });
    executor.sleep(seconds(1) + milliseconds(10));
    world.network().sever("store", "member1");
    world.network().unblock();
    executor.sleep(seconds(2));
    ASSERT_EQ(joined.size(), 2u);
    EXPECT_THAT(died, ElementsAre(joined[0]));
    EXPECT_NE(joined[1], joined[0]) << "others would take it for the instance that died";
    EXPECT_TRUE(membership->is_present(1));
    EXPECT_EQ(membership->member(1).instance, joined[1]);
    executor.sleep(seconds(3));
    membership->leave(world.in(seconds(5)));
  });
}

/// Whatever happens, all observers that were present throughout receive the same events in the same order.
/// Each rank's incarnations alternate between joining and ending, and in the end the tables agree.
TEST_P(OpenWorld, ObserversOfManyChangesAgree) {
  constexpr int kObservers = 3;
  SimulatedWorld world(GetParam(), 8, {.jitter = milliseconds(2)});
  std::map<int, std::vector<std::string>> heard;
  std::map<int, std::vector<std::string>> tables;
  world.run([&](int number) {
    auto& executor = world.executor();
    if (number < kObservers) {
      if (number > 0) executor.sleep(milliseconds(100 * number));
      const auto membership = world.join(number, visitor(world, number));
      const Diary diary(*membership);
      executor.sleep(seconds(40));
      for (const std::string& line : diary.lines) {
        if (line.find("worker1.") != 1 && line.find("worker2.") != 1) heard[number].push_back(line);
      }
      for (const Member& member : membership->members()) {
        tables[number].push_back(describe(member) + "." + std::to_string(member.incarnation) +
                                 (membership->is_present(member.rank) ? " in" : " gone"));
      }
      membership->barrier("end", {0, 1, 2}, world.in(seconds(5)));
      membership->leave(world.in(seconds(5)));
      return;
    }
    executor.sleep(seconds(1));
    for (int life = 0; life < 6; ++life) {
      const auto membership = world.join(number, visitor(world, number));
      EXPECT_EQ(membership->self().incarnation, static_cast<std::uint32_t>(life));
      executor.sleep(milliseconds(executor.random() % 2000));
      if (executor.random() % 2 == 0)
        membership->leave(world.in(seconds(5)));
      else
        world.kill(number);
      executor.sleep(milliseconds(10 + executor.random() % 1000));
    }
  });
  EXPECT_EQ(heard[0].size(), 5u * 6 * 2);
  for (int observer = 1; observer < kObservers; ++observer) {
    EXPECT_EQ(heard[observer], heard[0]);
    EXPECT_EQ(tables[observer], tables[0]);
  }
  std::map<std::string, int> lives;
  for (const std::string& line : heard[0]) {
    const std::string name = line.substr(1, line.find('.') - 1);
    const int step = lives[name]++;
    EXPECT_EQ(line[0] == '+', step % 2 == 0) << line;
    EXPECT_EQ(line.substr(line.find('.') + 1), std::to_string(step / 2)) << line;
  }
}

TEST_P(OpenWorld, RoundsContinueWithAReplacementAfterOneRetry) {
  SimulatedWorld world(GetParam(), 4, {.jitter = milliseconds(2)});
  std::vector<int> met(4, 0);
  world.run([&](int number) {
    auto& executor = world.executor();
    if (number > 0) executor.sleep(seconds(1));
    MembershipOptions options = world.options(number);  // a fixed world of 4
    options.instance = 0;
    auto membership = world.join(number, options);
    const int before = 3 + number;  // the workers have called different numbers of barriers
    for (int round = 0; round < before; ++round) membership->barrier("own", {number}, world.in(seconds(5)));
    membership->barrier("all", {}, world.in(seconds(5)));
    if (number == 3) {
      membership.reset();
      executor.sleep(milliseconds(executor.random() % 300));
      membership = world.join(number, options);
      EXPECT_EQ(membership->self().incarnation, 1u);
    }
    for (int attempt = 0; met[static_cast<std::size_t>(number)] < 5; ++attempt) {
      ASSERT_LT(attempt, 200) << "never met again";
      try {
        const auto all = membership->all_gather_bytes("all", Bytes{static_cast<std::byte>(number)}, {},
                                                      world.in(seconds(100)));
        for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(all.at(i), Bytes{static_cast<std::byte>(i)});
        ++met[static_cast<std::size_t>(number)];
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("worker3"));
        executor.sleep(milliseconds(20));
      }
    }
    membership->leave(world.in(seconds(5)));
  });
  EXPECT_EQ(met, std::vector<int>(4, 5));
}

TEST(OpenWorlds, WaitForRankZeroUntilTheirTimeout) {
  SimulatedWorld world(1, 3);
  world.run([&](int number) {
    if (number == 0) {
      world.executor().sleep(seconds(5));
      const auto membership = world.join(0, visitor(world, 0));
      world.executor().sleep(seconds(2));
      membership->leave(world.in(seconds(5)));
      return;
    }
    MembershipOptions options = visitor(world, number);
    if (number == 1) {
      options.timeout = seconds(2);
      const Error error = error_of([&] { world.join(1, options); });
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
      EXPECT_THAT(error.what(), HasSubstr("rank 0 at sim:store did not answer within 2 s"));
      return;
    }
    const auto membership = world.join(2, options);
    EXPECT_EQ(membership->self().rank, 1);
    membership->leave(world.in(seconds(5)));
  });
}

TEST(OpenWorlds, RejectTakenRanksAndNamesAndContinue) {
  SimulatedWorld world(2, 3);
  world.run([&](int number) {
    if (number > 0) world.executor().sleep(seconds(number));
    if (number < 2) {
      const auto membership = world.join(number, visitor(world, number));
      world.executor().sleep(seconds(5 - number));
      EXPECT_TRUE(membership->is_present(1 - number));
      EXPECT_EQ(membership->world_size(), 2);
      membership->leave(world.in(seconds(5)));
      return;
    }
    MembershipOptions twin = visitor(world, 2), greedy = visitor(world, 2, 1), fixed = world.options(2);
    twin.name = "worker1";
    EXPECT_THAT(error_of([&] { world.join(2, twin); }).what(),
                HasSubstr("'worker1' is taken by worker1 (rank 1"));
    EXPECT_THAT(error_of([&] { world.join(2, greedy); }).what(),
                HasSubstr("rank 1 is taken by worker1 (rank 1"));
    const Error error = error_of([&] { world.join(2, fixed); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("open world"), HasSubstr("fixed world of 3")));
  });
}

TEST(OpenWorlds, RequireTheNamesOfTheParticipants) {
  SimulatedWorld world(3, 1);
  world.run([&](int) {
    const auto membership = world.join(0, visitor(world, 0));
    EXPECT_THAT(error_of([&] { membership->barrier("b", {}, Deadline::never()); }).what(),
                HasSubstr("name the ranks"));
    EXPECT_THAT(error_of([&] {
                  membership->barrier("b", {0, 4}, Deadline::never());
                }).what(),
                HasSubstr("no rank 4 in this open world yet; there are [0]"));
    EXPECT_THAT(error_of([&] { membership->is_present(-1); }).what(), HasSubstr("-1"));
    EXPECT_EQ(membership->all_gather_bytes("g", Bytes(3), {0}, Deadline::never()).size(), 1u);
    membership->leave(Deadline::never());
    MembershipOptions options = visitor(world, 1, -2);
    EXPECT_THAT(error_of([&] { world.join(1, options); }).what(), HasSubstr("rank is -2"));
  });
}

TEST(OpenWorlds, NotifyLateListenersOfTheLatestHolderOfEachRank) {
  SimulatedWorld world(4, 2);
  world.run([&](int number) {
    if (number == 1) {
      for (int life = 0; life < 3; ++life) {
        world.executor().sleep(seconds(1));
        world.join(1, visitor(world, 1));
      }
      return;
    }
    const auto membership = world.join(0, visitor(world, 0));
    world.executor().sleep(seconds(10));
    const Diary diary(*membership);
    world.executor().sleep(seconds(1));
    EXPECT_THAT(diary.lines, ElementsAre("+worker1.2", "!worker1.2"));
    membership->leave(world.in(seconds(1)));
  });
}

TEST(OpenWorlds, KeepTheOrderAcrossSeparateCallbacks) {
  SimulatedWorld world(5, 2);
  world.run([&](int number) {
    if (number == 1) {
      for (int life = 0; life < 3; ++life) {
        world.executor().sleep(seconds(1));
        world.join(1, visitor(world, 1));
        world.join(1, visitor(world, 1));
      }
      return;
    }
    const auto membership = world.join(0, visitor(world, 0));
    std::vector<int> lives;
    membership->on_death([&](const Member& member, const Error&) {
      lives.push_back(-static_cast<int>(member.incarnation) - 1);
      if (member.incarnation == 0) world.executor().sleep(milliseconds(1500));
    });
    membership->on_join(
        [&](const Member& member) { lives.push_back(static_cast<int>(member.incarnation) + 1); });
    world.executor().sleep(seconds(10));
    EXPECT_THAT(lives, ElementsAre(1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6));
    membership->leave(world.in(seconds(1)));
  });
}

TEST(FixedWorld, IsGatheredWhileAnotherJoinIsRejected) {
  SimulatedWorld world(6, 3);
  world.run([&](int number) {
    if (number == 2) {
      world.executor().sleep(seconds(1));
      const Error error = error_of([&] { world.join(2, visitor(world, 2)); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("fixed world of 2"), HasSubstr("worker2 (no rank yet")));
      return;
    }
    if (number == 1) world.executor().sleep(seconds(2));
    MembershipOptions options = world.options(number);
    options.world_size = 2;
    const auto membership = world.join(number, options);
    EXPECT_FALSE(membership->open());
    membership->leave(world.in(seconds(5)));
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::open_world_test
