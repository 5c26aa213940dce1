// Regressions: a worker that leaves an open world whose members it cannot reach.
#include "rpc/references/control.h"
#include "tests/regression/rpc_defects.h"

namespace torchspan::rpc_defects_leaving {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)
using std::chrono::minutes;

ClusterOptions open_world(Marks& marks) {
  ClusterOptions options = world(marks, 3);
  options.open = true;
  options.graceful = false;
  return options;
}

/// Worker 2 leaves within `limit`, a second after `body`; the others stay, and worker 0 runs `meanwhile`.
/// Returns how long it takes to leave, and what that throws.
struct Leaving {
  Duration took{0};
  std::exception_ptr failure;
};
using Body = std::function<void(Worker&, SimCluster&)>;
Leaving leave(Duration limit, const Body& body, const Body& meanwhile = {}) {
  Marks marks;
  SimCluster cluster(open_world(marks));
  Leaving leaving;
  const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    if (worker.rank() == 0 && meanwhile) meanwhile(worker, cluster);
    if (worker.rank() != 2) return nap(worker, minutes(8));
    nap(worker, seconds(1));
    body(worker, cluster);
    nap(worker, seconds(1));
    EXPECT_TRUE(worker.backend()->is_present(1));
    const TimePoint begin = testing::now(worker);
    try {
      service.shutdown(cluster.executor().deadline_in(limit));
    } catch (const Error&) {
      leaving.failure = std::current_exception();
    }
    leaving.took = testing::now(worker) - begin;
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
  return leaving;
}

/// It listens no longer, and its connections break, but no death is reported to the others.
void stop_listening(SimCluster& cluster, int rank) { cluster.network().kill(SimCluster::name(rank)); }

RRef<Cell> cell_on_1(Worker& worker) {
  auto cell = worker.remote(1, kCell);
  cell.creation().wait();
  return cell;
}

TEST(RpcDefects, LeavingAnOpenWorldGivesUpAPeerThatIsSilent) {
  RRef<Cell> cell;
  const Leaving leaving = leave(minutes(5), [&](Worker& worker, SimCluster& cluster) {
    cell = cell_on_1(worker);
    cluster.network().cut("worker2", "worker1");
  });
  EXPECT_FALSE(leaving.failure) << describe(leaving.failure).text;
  EXPECT_LT(leaving.took, minutes(1));
}

TEST(RpcDefects, LeavingAnOpenWorldGivesUpAPeerThatRefusesConnections) {
  RRef<Cell> cell;
  const Leaving leaving = leave(minutes(5), [&](Worker& worker, SimCluster& cluster) {
    cell = cell_on_1(worker);
    stop_listening(cluster, 1);
  });
  EXPECT_FALSE(leaving.failure) << describe(leaving.failure).text;
  EXPECT_LT(leaving.took, minutes(1));
}

/// The question whether the peer has lost a reference to a value here gets no answer either.
TEST(RpcDefects, LeavingAnOpenWorldGivesUpAPeerThatHoldsItsValues) {
  RRef<Keeper> keeper;
  const Leaving leaving = leave(minutes(5), [&](Worker& worker, SimCluster& cluster) {
    keeper = worker.remote(1, kKeeper, RRef<Cell>(worker, Cell{}));
    keeper.creation().wait();
    stop_listening(cluster, 1);
  });
  EXPECT_FALSE(leaving.failure) << describe(leaving.failure).text;
  EXPECT_LT(leaving.took, minutes(1));
}

/// Each connection to it breaks soon, and each break triggers the question.
TEST(RpcDefects, LeavingAnOpenWorldGivesUpAPeerWhoseConnectionsBreak) {
  RRef<Keeper> keeper;
  const auto begin = [&](Worker& worker, SimCluster& cluster) {
    keeper = worker.remote(1, kKeeper, RRef<Cell>(worker, Cell{}));
    keeper.creation().wait();
    cluster.network().drop_if(
        [](const net::SimMessage& message) { return testing::request_type(message).has_value(); });
  };
  const auto trouble = [&](Worker& worker, SimCluster& cluster) {
    nap(worker, milliseconds(1550));
    for (int i = 0; i < 3000; ++i) {
      nap(worker, milliseconds(100));
      cluster.network().sever("worker2", "worker1");
    }
  };
  const Leaving leaving = leave(minutes(4), begin, trouble);
  EXPECT_FALSE(leaving.failure) << describe(leaving.failure).text;
  EXPECT_LT(leaving.took, minutes(1));
}

/// Each connection breaks soon, and the message that the reference is gone is lost.
TEST(RpcDefects, LeavingAnOpenWorldWaitsForAConnectionThatComesBack) {
  RRef<Cell> cell;
  const auto is_delete = testing::requests_of(rpc::UserDelete::kType);
  TimePoint healed = TimePoint::max(), last_sent;
  const auto begin = [&](Worker& worker, SimCluster& cluster) {
    cell = cell_on_1(worker);
    cluster.network().drop_if(is_delete);
    cluster.network().observe([&](const net::SimMessage& message) {
      if (is_delete(message)) last_sent = cluster.executor().now();
    });
  };
  const auto trouble = [&](Worker& worker, SimCluster& cluster) {
    nap(worker, milliseconds(1550));
    for (int i = 0; i < 30; ++i) {
      nap(worker, milliseconds(100));
      cluster.network().sever("worker2", "worker1");
    }
    cluster.network().drop_if({});
    healed = testing::now(worker);
  };
  const Leaving leaving = leave(minutes(5), begin, trouble);
  EXPECT_FALSE(leaving.failure) << describe(leaving.failure).text;
  EXPECT_GT(last_sent, healed);
}

TEST(RpcDefects, LeavingAnOpenWorldTooLateNamesUnansweredMessages) {
  for (const bool keeps : {true, false}) {
    std::vector<RRef<Cell>> cells;
    RRef<Keeper> keeper;
    const Leaving leaving = leave(seconds(5), [&](Worker& worker, SimCluster& cluster) {
      for (int i = 0; i < 3; ++i) cells.push_back(cell_on_1(worker));
      if (keeps) keeper = worker.remote(1, kKeeper, RRef<Cell>(worker, Cell{}));
      if (keeps) keeper.creation().wait();
      stop_listening(cluster, 1);
    });
    ASSERT_TRUE(leaving.failure);
    const Error error = to_error(leaving.failure);
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    const std::string unanswered = keeps ? "1 of 'rref.fork_audit'" : "3 of 'rref.user_delete'";
    EXPECT_THAT(error.message(), ::testing::HasSubstr("no answer to " + unanswered + " to worker 'worker1'"));
  }
}

}  // namespace
}  // namespace torchspan::rpc_defects_leaving
