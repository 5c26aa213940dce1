// Joining: names, worlds in one process, gathering and barriers.
#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_worlds {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t read(const RRef<std::int64_t>& rref) { return rref.to_here(); }

constexpr Function<add> kAdd{"add"};
constexpr Function<read> kRead{"read"};

ClusterOptions world(int workers) { return world_of(workers, FunctionTable().add(kAdd, kRead)); }

/// What each rank of a world with these names learns when it joins.
std::vector<std::exception_ptr> join_as(const std::vector<std::string>& names) {
  ClusterOptions options = world(static_cast<int>(names.size()));
  options.adjust = [&](int rank, WorkerPlan& plan) {
    plan.service.name = plan.join.name = names[rank];
    plan.join.timeout = seconds(10);
  };
  SimCluster cluster(options);
  return cluster.try_services([](rpc::WorkerService& service) { service.shutdown(); });
}

void expect_refused(const std::exception_ptr& failure, const std::string& text) {
  ASSERT_TRUE(failure) << "was not refused: " << text;
  const Error error = to_error(failure);
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
  EXPECT_THAT(error.what(), HasSubstr(text));
}

// peer: rpc_test.py invalid_names: same
TEST(RpcConformance, InvalidNames) {
  for (const std::string name : {"abc*", " ", "", "a b", "worker/1", "w\xc3\xb6rker"}) {
    expect_refused(join_as({name, "worker1"})[0], "1 to 127 of the characters");
    expect_refused(join_as({name})[0], "1 to 127 of the characters");
  }
  expect_refused(join_as({std::string(128, 'a')})[0], "128 characters");
  for (const std::string& name : {std::string(127, 'a'), std::string("Az_09.:-")}) {
    EXPECT_FALSE(join_as({name})[0]);
    EXPECT_FALSE(join_as({name, "worker1"})[0]);
  }
}

// peer: rpc_test.py duplicate_name: same
TEST(RpcConformance, DuplicateName) {
  for (const auto& failure : join_as({"duplicate_name", "duplicate_name"})) {
    expect_refused(failure, "duplicate_name");
  }
}

// peer: rpc_test.py duplicate_name_2: same
TEST(RpcConformance, DuplicateName2) {
  for (const auto& failure : join_as({"first", "duplicate_name", "third", "duplicate_name"})) {
    expect_refused(failure, "duplicate_name");
  }
}

// peer: rpc_test.py reinit: differs: nothing is global, so several workers may live in one process; a second
//   worker with the same name and rank is rejected by its world
TEST(RpcConformance, Reinit) {
  SimCluster cluster(world(2));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 1) return;
    rendezvous::MembershipOptions again;
    again.name = "worker1";
    again.rank = 1;
    again.world_size = 2;
    again.store_address = "sim:store";
    again.timeout = seconds(5);
    auto transports = [&](const std::string&, net::Handler& handler) {
      return cluster.network().make_transport("again", handler, {});
    };
    expect_refused(std::make_exception_ptr(
                       error_of([&] { rendezvous::Membership::join(worker.runtime(), transports, again); })),
                   "worker1");
    EXPECT_EQ(worker.rpc_sync("worker0", kAdd, 1, 2), 3) << "the world goes on";
  });
}

// peer: rpc_test.py init_rpc_twice: same
TEST(RpcConformance, InitRpcTwice) {
  SimCluster cluster(world(3));
  for (int round = 0; round < 2; ++round) {
    int answers = 0;
    cluster.run([&](Worker& worker) {
      auto sum = worker.remote((worker.rank() + 1) % 3, kAdd, worker.rank(), 10);
      EXPECT_EQ(worker.rpc_sync((worker.rank() + 2) % 3, kRead, sum), worker.rank() + 10);
      ++answers;
    });
    EXPECT_EQ(answers, 3);
  }
}

// peer: rpc_test.py world_size_one: same
TEST(RpcConformance, WorldSizeOne) {
  on_all(world(1), [](Worker& worker) {
    EXPECT_EQ(worker.world_size(), 1u);
    EXPECT_EQ(worker.rpc_sync("worker0", kAdd, 1, 2), 3);
    EXPECT_EQ(worker.rpc_async(0, kAdd, 3, 4).wait(), 7);
    auto sum = worker.remote(worker.info(), kAdd, 5, 6);
    EXPECT_EQ(sum.to_here(), 11);
    EXPECT_EQ(worker.remote(0, kRead, sum).to_here(), 11);
    EXPECT_EQ(worker.rpc_sync(0, "aten::add", {1, 2}).toInt(), 3);
    worker.barrier();
    EXPECT_EQ(worker.all_gather_bytes(Bytes{std::byte(7)}).at(0), Bytes{std::byte(7)});
    expect_error(ErrorKind::kInvalid, "there is no rank 1", [&] { worker.rpc_sync(1, kAdd, 1, 2); });
  });
}

// peer: rpc_test.py all_gather: same
TEST(RpcConformance, AllGather) {
  on_all(world(4), [](Worker& worker) {
    for (int round = 0; round < 3; ++round) {
      const auto all = worker.all_gather_bytes(Bytes{std::byte(worker.rank()), std::byte(round)});
      ASSERT_EQ(all.size(), 4u);
      for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(all[static_cast<std::size_t>(rank)], (Bytes{std::byte(rank), std::byte(round)}));
      }
    }
  });
}

// peer: rpc_test.py all_gather_timeout: same: the error names all late workers
TEST(RpcConformance, AllGatherTimeout) {
  on_all(world(4), [](Worker& worker) {
    if (worker.rank() >= 2) return nap(worker, seconds(3));
    const TimePoint begin = now(worker);
    const Error error = error_of([&] { worker.all_gather_bytes({}, {}, milliseconds(500)); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("worker2"), HasSubstr("worker3")));
    EXPECT_LT(now(worker) - begin, seconds(1));
  });
}

struct Arrivals {
  std::map<std::string, int> count;
};
/// Arrives late at random, waits for `group`, and expects that all members have arrived.
void meet(Worker& worker, SimExecutor& executor, Arrivals& arrivals, const std::vector<std::string>& group,
          int rounds) {
  for (int round = 1; round <= rounds; ++round) {
    nap(worker, milliseconds(executor.random() % 50));
    ++arrivals.count[worker.name()];
    worker.barrier(group);
    for (const std::string& name : group) EXPECT_GE(arrivals.count[name], round) << name;
  }
}
void meet_in(int workers, const std::function<std::vector<std::string>(std::uint32_t)>& group_of) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    ClusterOptions options = world(workers);
    options.seed = seed;
    SimCluster cluster(options);
    Arrivals arrivals;
    cluster.run([&](Worker& worker) {
      const auto group = group_of(worker.rank());
      if (!group.empty()) meet(worker, cluster.executor(), arrivals, group, 5);
    });
    for (int rank = 0; rank < workers; ++rank) {
      EXPECT_EQ(arrivals.count[SimCluster::name(rank)], group_of(rank).empty() ? 0 : 5);
    }
  }
}

// peer: rpc_test.py rpc_barrier_all: same
TEST(RpcConformance, RpcBarrierAll) {
  meet_in(4, [](std::uint32_t) {
    return std::vector<std::string>{"worker0", "worker1", "worker2", "worker3"};
  });
  on_all(world(4), [](Worker& worker) { worker.barrier(); });
}

// peer: rpc_test.py rpc_barrier_subset: same
TEST(RpcConformance, RpcBarrierSubset) {
  meet_in(5, [](std::uint32_t rank) {
    return rank % 2 == 0 ? std::vector<std::string>{"worker0", "worker2", "worker4"}
                         : std::vector<std::string>{"worker1", "worker3"};
  });
}

// peer: rpc_test.py rpc_barrier_partial_subset: same
TEST(RpcConformance, RpcBarrierPartialSubset) {
  meet_in(4, [](std::uint32_t rank) {
    return rank == 3 ? std::vector<std::string>() : std::vector<std::string>{"worker0", "worker1", "worker2"};
  });
}

// peer: rpc_test.py rpc_barrier_multithreaded: same
TEST(RpcConformance, RpcBarrierMultithreaded) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    ClusterOptions options = world(3);
    options.seed = seed;
    SimCluster cluster(options);
    int arrived = 0, passed = 0;
    cluster.run([&](Worker& worker) {
      std::vector<Thread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.push_back(cluster.executor().spawn("barrier", [&] {
          nap(worker, milliseconds(cluster.executor().random() % 20));
          ++arrived;
          worker.barrier();
          ++passed;
          EXPECT_GE(arrived, 3 * ((passed - 1) / 3 + 1)) << "the nth round passes when all came n times";
        }));
      }
    });
    EXPECT_EQ(arrived, 9);
    EXPECT_EQ(passed, 9);
  }
}

}  // namespace
}  // namespace torchspan::rpc_worlds
