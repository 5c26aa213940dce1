#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::open_world_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;

struct Tally {
  std::int64_t count = 0;
  std::int64_t add(std::int64_t by) { return count += by; }
};
std::string get_name(Worker& worker) { return worker.name(); }
void nap(Worker& worker, std::int64_t ms) { worker.runtime().executor.sleep(milliseconds(ms)); }
constexpr Function<get_name> kWorkerName{"get_name"};
constexpr Function<nap> kNap{"nap"};
constexpr Class<Tally> kTally{"Tally"};
constexpr Function<&Tally::add> kAdd{"Tally.add"};
void take(const RRef<Tally>&) {}
constexpr Function<take> kTake{"take"};
constexpr Function<get_name> kInlineName{"get_inline_name", kInline};

ClusterOptions open_world(std::uint64_t seed, int workers = 1) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.open = true;
  options.functions.add(kWorkerName, kInlineName, kNap, kTally, kAdd, kTake);
  return options;
}

/// Waits until a worker of that name has joined.
void await(Worker& worker, const std::string& name) {
  for (int i = 0; i < 1000; ++i) {
    for (const WorkerInfo& one : worker.workers()) {
      if (one.name == name) return;
    }
    worker.runtime().executor.sleep(milliseconds(1));
  }
  FAIL() << name << " did not join";
}

class OpenWorld : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, OpenWorld, ::testing::Range<std::uint64_t>(1, 11));

// peer: rpc_test.py dynamic_rpc_init_rpc: better: a killed worker can be restarted under its name
// peer: rpc_test.py dynamic_rpc_new_rank_can_communicated_with_existing_rank,
//   dynamic_rpc_existing_rank_can_communicate_with_new_rank: same
TEST_P(OpenWorld, LetsWorkersJoinAndLeave) {
  SimCluster world(open_world(GetParam()));
  world.run([&](Worker& worker) {
    EXPECT_EQ(worker.world_size(), 1u);
    EXPECT_THROW(worker.rpc_sync("worker1", kWorkerName), Error);
    std::vector<Thread> others;
    for (int rank = 1; rank <= 3; ++rank) {
      others.push_back(world.start(rank, 0, [&, rank](rpc::WorkerService& service) {
        // The worker that joined can call at once, in both directions, before the others learn that it
        // joined.
        EXPECT_EQ(service.worker().rpc_sync(0, kWorkerName), "worker0");
        service.worker().rpc_sync(0, kNap, 50 * rank);
        service.shutdown(world.executor().deadline_in(seconds(60)));
      }));
    }
    for (int rank = 1; rank <= 3; ++rank) {
      await(worker, SimCluster::name(rank));
      EXPECT_EQ(worker.rpc_sync(SimCluster::name(rank), kWorkerName), SimCluster::name(rank));
    }
    for (Thread& other : others) other.join();
    for (int i = 0; i < 100 && worker.world_size() > 1; ++i) worker.runtime().executor.sleep(milliseconds(1));
    EXPECT_EQ(worker.world_size(), 1u);
    try {
      worker.rpc_sync("worker2", kWorkerName);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.message(), HasSubstr("'worker0' (0)"));
    }
  });
}

TEST_P(OpenWorld, AnswersTheFirstInlineCallOfAWorkerThatJoins) {
  SimCluster world(open_world(GetParam(), 2));
  world.run([&](Worker& worker) {
    if (worker.rank() == 1) return worker.runtime().executor.sleep(seconds(20));
    await(worker, "worker1");
    // Worker 1 learns of the joiner long after its call has arrived.
    world.network().delay_if(
        [](const net::SimMessage& message) { return message.to == "sim:worker1.membership"; },
        milliseconds(300));
    Thread joiner = world.start(2, 0, [&](rpc::WorkerService& service) {
      const TimePoint before = world.executor().now();
      EXPECT_EQ(service.worker().rpc_sync(1, kInlineName), "worker1");
      EXPECT_GE(world.executor().now() - before, milliseconds(300));
      EXPECT_LT(world.executor().now() - before, seconds(1));
      service.shutdown(world.executor().deadline_in(seconds(60)));
    });
    joiner.join();
  });
}

// peer: rpc/more a killed worker can be restarted under its name: better
TEST_P(OpenWorld, TakesARestartedWorkerBackUnderItsName) {
  SimCluster world(open_world(GetParam()));
  world.run([&](Worker& worker) {
    std::vector<Thread> lives;
    for (int incarnation = 0; incarnation < 3; ++incarnation) {
      lives.push_back(world.start(1, incarnation, [&, incarnation](rpc::WorkerService& service) {
        world.executor().sleep(seconds(incarnation == 2 ? 5 : 100));
        if (incarnation == 2) service.shutdown(world.executor().deadline_in(seconds(60)));
      }));
      await(worker, "worker1");
      auto tally = worker.remote("worker1", kTally);
      EXPECT_EQ(tally.rpc_sync(kAdd, 5), 5) << "its own value, not its predecessor's";
      if (incarnation == 2) break;
      auto lost = worker.rpc_async("worker1", kNap, 1000);
      world.executor().sleep(milliseconds(10));
      const TimePoint before = world.executor().now();
      world.kill(1);
      try {
        lost.wait();
        FAIL() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
        EXPECT_LT(world.executor().now() - before, seconds(1));
      }
      for (int i = 0; i < 100 && worker.world_size() > 1; ++i) world.executor().sleep(milliseconds(1));
      EXPECT_EQ(worker.world_size(), 1u);
      EXPECT_THROW(tally.rpc_sync(kAdd, 5), Error);
      EXPECT_EQ(worker.debug().pending.size(), 0u);
    }
    for (Thread& life : lives) life.join();
  });
}

TEST_P(OpenWorld, FreesValuesReferencedByDeadWorkers) {
  SimCluster world(open_world(GetParam()));
  world.run([&](Worker& worker) {
    Thread life = world.start(1, 0, [&](rpc::WorkerService& service) {
      auto tally = service.worker().remote(0, kTally);
      tally.rpc_sync(kAdd, 1);
      world.executor().sleep(seconds(100));
    });
    await(worker, "worker1");
    world.executor().sleep(milliseconds(100));
    EXPECT_EQ(worker.debug().references.forks, 1u);
    world.kill(1);
    world.executor().sleep(seconds(1));
    EXPECT_EQ(worker.debug().references.owners, 0u);
    EXPECT_EQ(worker.debug().references.forks, 0u);
    life.join();
  });
}

TEST(OpenWorldRounds, NameTheirParticipants) {
  SimCluster world(open_world(1, 3));
  world.run([&](Worker& worker) {
    for (int rank = 0; rank < 3; ++rank) await(worker, SimCluster::name(rank));
    EXPECT_THROW(worker.barrier(), Error);
    worker.barrier({"worker0", "worker1", "worker2"}, seconds(10));
  });
}

// peer: rpc/more a killed worker can be restarted under its name
TEST(FixedWorld, TakesAReplacementForADeadWorker) {
  ClusterOptions options = open_world(3, 3);
  options.open = false;
  options.graceful = false;
  SimCluster world(options);
  world.run([&](Worker& worker) {
    if (worker.rank() == 1) return worker.runtime().executor.sleep(seconds(100));
    if (worker.rank() == 2) return worker.runtime().executor.sleep(seconds(100));
    auto old = worker.remote("worker1", kTally);
    EXPECT_EQ(old.rpc_sync(kAdd, 1), 1);
    world.kill(1);
    EXPECT_THROW(old.rpc_sync(kAdd, 1), Error);
    world.executor().sleep(seconds(1));
    EXPECT_EQ(worker.world_size(), 3u) << "a fixed world keeps its places";
    Thread life = world.start(1, 1, [&](rpc::WorkerService& service) {
      EXPECT_EQ(service.worker().rpc_sync(2, kWorkerName), "worker2");
      world.executor().sleep(seconds(50));
    });
    world.executor().sleep(seconds(1));
    auto fresh = worker.remote("worker1", kTally);
    EXPECT_EQ(fresh.rpc_sync(kAdd, 5), 5);
    EXPECT_THROW(old.rpc_sync(kAdd, 1), Error) << "what the dead worker owned is gone";
    EXPECT_THAT(testing::error_text([&] { worker.rpc_sync(2, kTake, old); }),
                HasSubstr("an earlier process of rank 1, its owner, died or left"));
    life.join();
  });
}

TEST(Hosts, ThatVanishFailTheirCallsWithinTheLivenessInterval) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    ClusterOptions options = open_world(seed, 3);
    options.open = false;
    options.graceful = false;
    options.adjust = [](int rank, testing::WorkerPlan& plan) {
      plan.join.host_id = "host" + std::to_string(rank);
    };
    SimCluster world(options);
    world.run([&](Worker& worker) {
      if (worker.rank() != 0) return worker.runtime().executor.sleep(seconds(60));
      auto lost = worker.rpc_async(1, kNap, 30'000);
      auto kept = worker.rpc_async(2, kNap, 10'000);
      world.executor().sleep(seconds(1));
      const TimePoint before = world.executor().now();
      for (const char* other : {"worker0", "worker2", "store", "worker0.membership"}) {
        world.network().cut("worker1", other);
        world.network().cut("worker1.membership", other);
      }
      try {
        lost.wait();
        FAIL() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << "seed " << seed;
        EXPECT_EQ(error.worker(), "worker1");
        EXPECT_THAT(error.message(), HasSubstr("silent for"));
      }
      EXPECT_LT(world.executor().now() - before, milliseconds(6000));
      EXPECT_GT(world.executor().now() - before, milliseconds(4000));
      EXPECT_THROW(worker.rpc_sync(1, kWorkerName), Error) << "at once from now on";
      kept.wait();
      EXPECT_EQ(worker.rpc_sync(2, kWorkerName), "worker2");
    });
  }
}

}  // namespace
}  // namespace torchspan::open_world_test
