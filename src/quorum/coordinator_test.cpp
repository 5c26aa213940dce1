// Rank 0's coordinator in simulated worlds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/detail/quorum/extension.h>
#include <torchspan/rpc/worker.h>

#include "quorum/api/generation_client.h"
#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::quorum::coordinator_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::ClusterOptions;
using torchspan::testing::SimCluster;

ClusterOptions open_world_with_quorum(std::uint64_t seed) {
  ClusterOptions options;
  options.workers = 1;
  options.seed = seed;
  options.open = true;
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<QuorumExtension>());
    return extensions;
  };
  return options;
}

constexpr Report kFirstReport{
    .holds_state = true, .target = 1, .late_limit = seconds(30), .too_few_limit = seconds(30)};

/// A fixed world whose workers may die.
ClusterOptions mortal_world_with_quorum(std::uint64_t seed) {
  ClusterOptions options = open_world_with_quorum(seed);
  options.workers = 3;
  options.open = false;
  options.graceful = false;
  return options;
}

Report next_report(const Generation& after) {
  Report report = kFirstReport;
  report.generation = after.number;
  return report;
}

class CoordinatorOfSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, CoordinatorOfSeed, ::testing::Range<std::uint64_t>(1, 5));

TEST_P(CoordinatorOfSeed, BeginsWithTheRanksOfAnOpenWorldThatHasGaps) {
  SimCluster world(open_world_with_quorum(GetParam()));
  world.run([&](Worker& worker) {
    Generation theirs;
    std::uint64_t ended = 1;
    Thread other = world.start(2, 0, [&](rpc::WorkerService& service) {
      GenerationClient client(service.worker(), "trainer");
      theirs = client.next(kFirstReport);
      ended = client.departures(theirs);
      service.shutdown(world.executor().deadline_in(seconds(60)));
    });
    for (int i = 0; i < 1000 && worker.world_size() < 2; ++i)
      worker.runtime().executor.sleep(milliseconds(1));
    const TimePoint began = world.executor().now();
    GenerationClient client(worker, "trainer");
    const Generation mine = client.next(kFirstReport);
    EXPECT_LT(world.executor().now() - began, seconds(1)) << "it waited for a rank that does not exist";
    EXPECT_THAT(mine.ranks, ElementsAre(0, 2));
    other.join();
    EXPECT_EQ(theirs, mine);
    EXPECT_EQ(ended, 0u);
    for (int i = 0; i < 1000 && client.departures(mine) == 0; ++i)
      worker.runtime().executor.sleep(milliseconds(1));
    EXPECT_EQ(client.departures(mine), 1u) << "rank 2 has left";
  });
}

/// Rank 0 would take it for the first one, which did not get its answer: run() would return without a step.
TEST_P(CoordinatorOfSeed, RefusesASecondTrainerOfTheSameName) {
  SimCluster world(open_world_with_quorum(GetParam()));
  world.run([&](Worker& worker) {
    GenerationClient first(worker, "trainer");
    Report report = kFirstReport;
    report.target = 0;
    const Generation complete = first.next(report);
    EXPECT_TRUE(complete.complete);
    GenerationClient second(worker, "trainer"), other(worker, "another trainer");
    const Error error = torchspan::testing::error_of([&] { second.next(kFirstReport); });
    second.withdraw(error.message());  // as run() does; the first trainer goes on
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("'trainer' has trained before in this process"));
    EXPECT_FALSE(other.next(kFirstReport).complete);
    EXPECT_EQ(first.next(next_report(complete)).number, complete.number + 1);
  });
}

/// Rank 1 comes late to a generation whose rank 2 died and was replaced meanwhile.
TEST_P(CoordinatorOfSeed, EndsAGenerationWhoseMemberWasReplacedBeforeAllWereThere) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  const auto meet_next = [&](GenerationClient& client, const Report& report) {
    const Generation next = client.next(report);
    EXPECT_EQ(next.number, 2U);
    EXPECT_THAT(next.ranks, ElementsAre(0, 1, 2));
    EXPECT_TRUE(client.await_members(next, seconds(120)));
    return next;
  };
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "the trainer");
    const Generation first = client.next(kFirstReport);
    EXPECT_THAT(first.ranks, ElementsAre(0, 1, 2));
    if (worker.rank() == 2) return executor.sleep(seconds(300));
    if (worker.rank() == 1) {
      executor.sleep(seconds(10));
      const TimePoint began = executor.now();
      EXPECT_FALSE(client.await_members(first, seconds(120)));
      EXPECT_LT(executor.now() - began, seconds(2)) << "it waited for a process that is gone";
      meet_next(client, next_report(first));
      return executor.sleep(seconds(60));
    }
    executor.sleep(seconds(1));
    world.kill(2);
    EXPECT_EQ(torchspan::testing::kind_of([&] { client.await_members(first, seconds(120)); }),
              ErrorKind::kDisconnected);
    Thread replacement = world.start(2, 1, [&](rpc::WorkerService& service) {
      GenerationClient theirs(service.worker(), "the trainer");
      meet_next(theirs, kFirstReport);
      executor.sleep(seconds(30));
    });
    const Generation second = meet_next(client, next_report(first));
    const TimePoint began = executor.now();
    const Error late = torchspan::testing::error_of([&] { client.await_members(second, seconds(3)); });
    EXPECT_EQ(late.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(late.message(), HasSubstr("worker1 (rank 1"));
    EXPECT_LT(executor.now() - began, seconds(4));
    replacement.join();
  });
}

TEST_P(CoordinatorOfSeed, WaitsForALateMemberAndEndsAGenerationThatOneHasLeft) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    const Generation first = client.next(kFirstReport);
    executor.sleep(seconds(7 * worker.rank()));
    EXPECT_TRUE(client.await_members(first, seconds(120))) << "rank 2 was late";
    const Generation second = client.next(next_report(first));
    if (worker.rank() != 2) {
      const TimePoint began = executor.now();
      EXPECT_FALSE(client.await_members(second, seconds(120))) << "rank 2 has left";
      EXPECT_LT(executor.now() - began, seconds(6));
    }
    const Generation third = client.next(next_report(second));
    EXPECT_TRUE(client.await_members(third, seconds(120)));
    executor.sleep(seconds(60));
  });
}

TEST_P(CoordinatorOfSeed, EndsTheWaitOfAMemberThatWasLeftOutWhileAnotherOneWasReplaced) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  const auto meet_second = [&](GenerationClient& client, const Report& report) {
    const Generation second = client.next(report);
    EXPECT_THAT(second.ranks, ElementsAre(0, 2)) << "rank 1 was late";
    EXPECT_TRUE(client.await_members(second, seconds(120)));
    executor.sleep(seconds(20));  // rank 1 arrives meanwhile, and no rank waits then
    return second;
  };
  const auto meet_third = [&](GenerationClient& client, const Generation& after) {
    const Generation third = client.next(next_report(after));
    EXPECT_THAT(third.ranks, ElementsAre(0, 1, 2));
    EXPECT_TRUE(client.await_members(third, seconds(120)));
    executor.sleep(seconds(60));
  };
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    const Generation first = client.next(kFirstReport);
    if (worker.rank() == 2) return executor.sleep(seconds(300));
    if (worker.rank() == 1) {
      executor.sleep(kFirstReport.late_limit + seconds(10));
      const TimePoint began = executor.now();
      EXPECT_FALSE(client.await_members(first, seconds(120)));
      EXPECT_LT(executor.now() - began, seconds(2)) << "it waited alone";
      return meet_third(client, first);
    }
    executor.sleep(seconds(1));
    world.kill(2);
    EXPECT_EQ(torchspan::testing::kind_of([&] { client.await_members(first, seconds(120)); }),
              ErrorKind::kDisconnected);
    Thread replacement = world.start(2, 1, [&](rpc::WorkerService& service) {
      GenerationClient theirs(service.worker(), "trainer");
      meet_third(theirs, meet_second(theirs, kFirstReport));
    });
    meet_third(client, meet_second(client, next_report(first)));
    replacement.join();
  });
}

TEST_P(CoordinatorOfSeed, EndsAGenerationOfWhichAMemberHasWithdrawn) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    const Generation first = client.next(kFirstReport);
    if (worker.rank() == 2) {
      client.withdraw("its program failed");
      return executor.sleep(seconds(120));
    }
    const TimePoint began = executor.now();
    EXPECT_FALSE(client.await_members(first, seconds(120)));
    EXPECT_LT(executor.now() - began, seconds(6)) << "it waited for a rank that has withdrawn";
    const Generation second = client.next(next_report(first));
    EXPECT_THAT(second.ranks, ElementsAre(0, 1));
    EXPECT_TRUE(client.await_members(second, seconds(120)));
    executor.sleep(seconds(60));
  });
}

TEST_P(CoordinatorOfSeed, SaysWhyNoRankHasTheStateAfterAllHaveWithdrawn) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    const Generation first = client.next(kFirstReport);
    client.withdraw(worker.rank() == 1 ? "bad batch" : "bad loss");
    executor.sleep(seconds(10));
    const Error lost = torchspan::testing::error_of([&] { client.next(next_report(first)); });
    EXPECT_EQ(lost.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(lost.message(),
                HasSubstr("have left training (rank 0: its run() threw: bad loss; rank 1: its "
                          "run() threw: bad batch; rank 2: its run() threw: bad loss)"));
    executor.sleep(seconds(60));
  });
}

TEST_P(CoordinatorOfSeed, EndsTheWaitOfMembersThatLoseRank0WhichIsNoMember) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      executor.sleep(seconds(1));
      world.kill(0);
      return executor.sleep(seconds(200));
    }
    if (worker.rank() == 2) return executor.sleep(seconds(200));
    GenerationClient client(worker, "trainer");
    const Generation without_rank_0{.number = 1, .ranks = {1, 2}};
    const TimePoint began = executor.now();
    EXPECT_EQ(torchspan::testing::kind_of([&] { client.await_members(without_rank_0, seconds(120)); }),
              ErrorKind::kDisconnected);
    EXPECT_LT(executor.now() - began, seconds(10));
    executor.sleep(seconds(10));
  });
}

TEST_P(CoordinatorOfSeed, EndsTheWaitAtItsLimitAlthoughRank0DoesNotAnswer) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    if (worker.rank() != 1) return executor.sleep(seconds(60));
    GenerationClient client(worker, "trainer");
    const TimePoint began = executor.now();
    world.network().cut("worker0", "worker1");  // but not worker1 from the store
    const Generation without_rank_0{.number = 1, .ranks = {1, 2}};
    EXPECT_EQ(torchspan::testing::kind_of([&] { client.await_members(without_rank_0, seconds(1)); }),
              ErrorKind::kTimedOut);
    EXPECT_LT(executor.now() - began, seconds(4));
    world.network().heal("worker0", "worker1");
  });
}

TEST_P(CoordinatorOfSeed, TellsTrainersWithSimilarNamesApart) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  const std::string start(80, 'x');
  world.run([&](Worker& worker) {
    GenerationClient client(worker, start + (worker.rank() == 0 ? ".first" : ".second"));
    const Generation all{.number = 1, .ranks = {0, 1, 2}};
    EXPECT_EQ(torchspan::testing::kind_of([&] { client.await_members(all, seconds(3)); }),
              ErrorKind::kTimedOut);
    executor.sleep(seconds(60));
  });
}

TEST_P(CoordinatorOfSeed, EndsTheWaitOfALateMemberForOnesThatHaveGivenUp) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    const Generation first = client.next(kFirstReport);
    const bool late = worker.rank() == 1;
    if (late) executor.sleep(seconds(30));
    const TimePoint began = executor.now();
    const Error error = torchspan::testing::error_of([&] { client.await_members(first, seconds(10)); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.message(), HasSubstr("worker1 (rank 1"));
    EXPECT_LT(executor.now() - began, seconds(late ? 2 : 12));
    executor.sleep(seconds(late ? 10 : 60));
  });
}

/// The program of rank 0 may end with the refusal, and its process with it.
TEST_P(CoordinatorOfSeed, RefusesRank0WhenTheOthersKnowThatTheyAreRefused) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  int refused = 0;
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    Report report = kFirstReport;
    report.min_ranks = 3;
    report.too_few_limit = seconds(2);
    const Generation first = client.next(report);
    if (worker.rank() == 2) return executor.sleep(seconds(60));
    if (worker.rank() == 0) {
      executor.sleep(seconds(1));
      world.kill(2);
    }
    report.generation = first.number;
    const TimePoint began = executor.now();
    const Error error = torchspan::testing::error_of([&] { client.next(report); });
    EXPECT_THAT(error.message(), HasSubstr("only 2 ranks can train, and min_ranks is 3: rank 2: worker2"));
    ++refused;
    if (worker.rank() == 0) {
      EXPECT_LT(executor.now() - began, seconds(3)) << "it waited for a rank that has withdrawn";
      world.kill(0);
    } else {
      client.withdraw("it was refused");
    }
    executor.sleep(seconds(60));
  });
  EXPECT_EQ(refused, 2);
}

TEST_P(CoordinatorOfSeed, RefusesRank0InTimeIfAnotherRankDoesNotWithdraw) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  world.run([&](Worker& worker) {
    GenerationClient client(worker, "trainer");
    Report report = kFirstReport;
    report.min_ranks = 4;
    report.too_few_limit = seconds(2);
    const TimePoint began = executor.now();
    EXPECT_THAT(torchspan::testing::error_of([&] { client.next(report); }).message(),
                HasSubstr("min_ranks is 4"));
    EXPECT_LT(executor.now() - began, seconds(worker.rank() == 0 ? 8 : 3));
    executor.sleep(seconds(60));
  });
}

TEST_P(CoordinatorOfSeed, SaysWhatToDoWhenAWorkerHasLostRank0) {
  SimCluster world(mortal_world_with_quorum(GetParam()));
  Executor& executor = world.executor();
  std::weak_ptr<rpc::WorkerBackend> lost_backend;
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      lost_backend = worker.backend()->weak_from_this();
      executor.sleep(seconds(1));
      world.kill(0);
      return executor.sleep(seconds(60));
    }
    GenerationClient client(worker, "trainer");
    const Error lost = torchspan::testing::error_of([&] { client.next(kFirstReport); });
    EXPECT_EQ(lost.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(lost.message(), HasSubstr("this worker has lost it (worker0 (rank 0"));
    EXPECT_THAT(lost.message(), HasSubstr("restart the job from its last checkpoint"));
    EXPECT_THAT(lost.message(), HasSubstr("if it declared this worker dead, restart this worker"));
    executor.sleep(seconds(10));
  });
  EXPECT_TRUE(lost_backend.expired());  // though the calls of the others waited there
}

}  // namespace
}  // namespace torchspan::quorum::coordinator_test
