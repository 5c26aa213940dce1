// Regressions: references whose messages are lost or refused; they used to leak.
#include "tests/regression/rpc_defects.h"

namespace torchspan::rpc_defects_references {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)

TEST(RpcDefects, LateReplyReturnsItsReferencesToAUser) {
  Marks marks;
  SimCluster cluster(world(marks, 3));
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      auto cell = worker.remote(2, kCell);
      EXPECT_EQ(cell.rpc_sync(kGet), 7);
      auto keeper = worker.remote(1, kKeeper, cell);
      keeper.creation().wait();
      EXPECT_THROW(worker.with({.timeout = milliseconds(100)}).call_on(keeper, kKeptLate, 300).wait(), Error);
      nap(worker, seconds(1));
      EXPECT_EQ(worker.debug().late_replies, 1u);
    }
    nap(worker, seconds(60));
    EXPECT_EQ(worker.debug().references.pending_children, 0u) << worker.debug().str();
  });
}

TEST(RpcDefects, LateReplyReturnsItsReferencesToTheirOwner) {
  Marks marks;
  SimCluster cluster(world(marks, 2));
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      EXPECT_THROW(worker.with({.timeout = milliseconds(100)}).rpc_sync(1, kMakeLate, 300), Error);
    }
    nap(worker, seconds(60));
    if (worker.rank() == 1) {
      EXPECT_EQ(worker.debug().references.owners, 0u);
    }
  });
}

TEST(RpcDefects, RefusedRequestGivesItsReferencesBack) {
  Marks marks;
  ClusterOptions options = world(marks, 3);
  options.threads = 1;
  options.service.max_waiting_bytes = 64 << 10;
  first(options, [](Worker& worker, SimCluster&) {
    auto cell = worker.remote(2, kCell);
    EXPECT_EQ(cell.rpc_sync(kGet), 7);
    auto busy = worker.rpc_async(1, kSleepMs, 500);
    nap(worker, milliseconds(10));
    std::vector<Future<void>> calls;
    for (int i = 0; i < 10; ++i)
      calls.push_back(worker.rpc_async(1, kTake, cell, at::zeros({20 << 10}, at::kByte)));
    int refused = 0;
    for (auto& call : calls) {
      try {
        call.wait();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
        ++refused;
      }
    }
    EXPECT_GT(refused, 0);
    busy.wait();
    nap(worker, seconds(5));
    EXPECT_EQ(worker.debug().references.pending_children, 0u);
  });
}

TEST(RpcDefects, RequestLostWithItsConnectionGivesItsReferencesBack) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Marks marks;
    ClusterOptions options = world(marks, 3);
    options.seed = seed;
    options.network.latency = milliseconds(10);
    first(options, [&](Worker& worker, SimCluster& cluster) {
      auto cell = worker.remote(2, kCell);
      EXPECT_EQ(cell.rpc_sync(kGet), 7);
      worker.rpc_sync(1, kSleepMs, 1);
      auto call = worker.rpc_async(1, kTake, cell, at::Tensor());
      nap(worker, milliseconds(5));
      cluster.network().sever("worker0", "worker1");
      EXPECT_THROW(call.wait(), Error);
      nap(worker, seconds(60));
      EXPECT_EQ(worker.debug().references.pending_children, 0u) << "seed " << seed;
    });
    if (HasFailure()) return;
  }
}

TEST(RpcDefects, RequestLostWithItsConnectionGivesTheOwnersForkBack) {
  Marks marks;
  ClusterOptions options = world(marks, 2);
  options.network.latency = milliseconds(10);
  first(options, [&](Worker& worker, SimCluster& cluster) {
    worker.rpc_sync(1, kSleepMs, 1);
    {
      RRef<Cell> cell(worker, Cell{});
      auto call = worker.rpc_async(1, kTake, cell, at::Tensor());
      nap(worker, milliseconds(5));
      cluster.network().sever("worker0", "worker1");
      EXPECT_THROW(call.wait(), Error);
    }
    nap(worker, seconds(60));
    EXPECT_EQ(worker.debug().references.owners, 0u);
  });
}

TEST(RpcDefects, ChildOfAReceiverThatDiedIsForgotten) {
  Marks marks;
  ClusterOptions options = world(marks, 3);
  options.graceful = false;
  options.network.latency = milliseconds(10);
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, seconds(90));
    auto cell = worker.remote(1, kCell);
    EXPECT_EQ(cell.rpc_sync(kGet), 7);
    worker.rpc_sync(2, kSleepMs, 1);
    auto call = worker.rpc_async(2, kTake, cell, at::Tensor());
    nap(worker, milliseconds(5));
    cluster.kill(2);
    EXPECT_THROW(call.wait(), Error);
    nap(worker, seconds(60));
    EXPECT_FALSE(worker.backend()->is_present(2));
    EXPECT_EQ(worker.debug().references.pending_children, 0u);
  });
}

TEST(RpcDefects, OwnCreationThatNeverBeganIsForgotten) {
  Marks marks;
  first(world(marks, 1), [](Worker& worker, SimCluster&) {
    std::stop_source source;
    source.request_stop();
    { auto cell = worker.with({.stop = source.get_token()}).remote(0, kCell); }
    nap(worker, seconds(1));
    EXPECT_EQ(worker.debug().references.owners, 0u);
  });
}

/// Replies and requests with references over connections that break at random: in the end all tables are
/// empty and every worker shuts down.
RRef<Cell> pass_on(Worker& worker, const RRef<Cell>& cell, std::int64_t hops) {
  if (hops == 0) return cell;
  return worker.rpc_sync((worker.rank() + 1) % worker.world_size(), Function<pass_on>{"pass_on"}, cell,
                         hops - 1);
}

TEST(RpcDefects, RandomBreaksLoseNoReference) {
  int stuck = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    Marks marks;
    ClusterOptions options = world(marks, 3);
    options.functions.add(Function<pass_on>{"pass_on"});
    options.seed = seed;
    options.network.latency = milliseconds(2);
    options.network.jitter = milliseconds(2);
    SimCluster cluster(options);
    try {
      cluster.run([&](Worker& worker) {
        const std::uint32_t next = (worker.rank() + 1) % 3;
        for (int i = 0; i < 10; ++i) {
          try {
            auto cell = worker.remote(next, kCell);
            worker.rpc_sync(next, Function<pass_on>{"pass_on"}, cell, 3);
          } catch (const Error&) {
          }
          if (worker.rank() == 0 && i % 3 == 0) cluster.network().sever("worker1", "worker2");
        }
        nap(worker, seconds(60));
        const auto references = worker.debug().references;
        if (references.pending_children + references.pending_users + references.owners != 0) ++stuck;
      });
    } catch (const std::exception& failure) {
      ADD_FAILURE() << "seed " << seed << ": " << failure.what();
    }
  }
  EXPECT_EQ(stuck, 0);
}

}  // namespace
}  // namespace torchspan::rpc_defects_references
