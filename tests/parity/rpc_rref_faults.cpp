// References whose messages are late or lost, whose creation failed, or whose worker shut down.
#include <map>

#include <ATen/ATen.h>

#include "rpc/agent/agent.h"
#include "rpc/references/control.h"
#include "tests/parity/rpc_faults.h"

namespace torchspan::rpc_rref_faults {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Lives {
  int made = 0;
  int alive = 0;
};
class Witness {
 public:
  explicit Witness(Lives& lives) : lives_(&lives) {
    ++lives.made;
    ++lives.alive;
  }
  Witness(Witness&& other) noexcept : lives_(std::exchange(other.lives_, nullptr)) {}
  ~Witness() {
    if (lives_ != nullptr) --lives_->alive;
  }
  std::int64_t number() const { return 35; }

 private:
  Lives* lives_;
};

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
Witness make_tracked(Worker& worker) { return Witness(state_of<Lives>(worker)); }
Witness make_slowly(Worker& worker) {
  nap(worker, seconds(2));
  return Witness(state_of<Lives>(worker));
}
std::int64_t read_tracked(const RRef<Witness>& tracked);
std::int64_t read_slowly(Worker& worker, const RRef<Witness>& tracked) {
  nap(worker, seconds(1));
  return tracked.local_value().number();
}
/// Values on this worker that others refer to, and their references.
std::int64_t counted(Worker& worker) {
  const auto references = worker.debug().references;
  return static_cast<std::int64_t>(references.owners + references.forks);
}
void sleep_a_second(Worker& worker) { nap(worker, seconds(1)); }
RRef<Witness> same(const RRef<Witness>& tracked) { return tracked; }
struct Keeper {
  explicit Keeper(const RRef<Witness>& kept) : kept(kept) {}
  RRef<Witness> kept;
};

constexpr Function<add> kAdd{"add"};
constexpr Function<make_tracked> kMakeTracked{"make_tracked"};
constexpr Function<make_slowly> kMakeSlowly{"make_slowly"};
constexpr Function<&Witness::number> kNumber{"Witness.number"};
constexpr Function<read_tracked> kReadTracked{"read_tracked"};
constexpr Function<read_slowly> kReadSlowly{"read_slowly"};
constexpr Function<counted> kCounted{"counted"};
constexpr Function<sleep_a_second> kSleepASecond{"sleep_a_second"};
constexpr Function<same> kSame{"same"};
constexpr Class<Keeper, RRef<Witness>> kKeeper{"Keeper"};

std::int64_t read_tracked(const RRef<Witness>& tracked) { return tracked.rpc_sync(kNumber); }

ClusterOptions world(Lives& lives, int workers = 3) {
  return with_state(
      world_of(workers, FunctionTable().add(kAdd, kMakeTracked, kMakeSlowly, kNumber, kReadTracked,
                                            kReadSlowly, kCounted, kSleepASecond, kSame, kKeeper)),
      lives);
}

/// Runs `body` on worker 0 under seeds 1 to 3, with access to the network; then shuts down gracefully and
/// expects that no value is left.
void with_network(int workers, const std::function<void(Worker&, SimCluster&, Lives&)>& body) {
  for (std::uint64_t seed = 1; seed <= 3 && !::testing::Test::HasFailure(); ++seed) {
    Lives lives;
    ClusterOptions options = world(lives, workers);
    options.seed = seed;
    SimCluster cluster(options);
    try {
      cluster.run([&](Worker& worker) {
        if (worker.rank() != 0) return;
        body(worker, cluster, lives);
        cluster.network().drop_if({});
        cluster.network().delay_if({}, {});
      });
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    EXPECT_EQ(lives.alive, 0);
    if (::testing::Test::HasFailure()) ADD_FAILURE() << "seed " << seed;
  }
}

// peer: faulty_agent_rpc_test.py check_failed_messages: same: for FORK_REQUEST, CHILD_ACCEPT and
//   USER_DELETE; CLEANUP is a row of distributed autograd
TEST(RpcConformance, CheckFailedMessages) {
  std::map<wire::MessageType, int> seen;
  with_network(3, [&](Worker& worker, SimCluster& cluster, Lives& lives) {
    seen.clear();
    cluster.network().drop_if([&](const net::SimMessage& message) {
      const auto type = request_type(message);
      if (type != rpc::ForkRequest::kType && type != rpc::ChildAccept::kType &&
          type != rpc::UserDelete::kType)
        return false;
      return seen[*type]++ < 3;
    });
    {
      auto tracked = worker.remote("worker1", kMakeTracked);
      EXPECT_EQ(worker.rpc_sync("worker2", kReadTracked, tracked), 35);
      EXPECT_EQ(lives.made, 1);
    }
    nap(worker, seconds(30));
    EXPECT_EQ(lives.alive, 0);
    for (const auto type : {rpc::ForkRequest::kType, rpc::ChildAccept::kType, rpc::UserDelete::kType}) {
      EXPECT_GT(seen[type], 3) << "sent again until it arrived: " << static_cast<int>(type);
    }
  });
}

void expect_no_creation(const RRef<Witness>& tracked) {
  const Error error = error_of([&] { tracked.creation().wait(); });
  EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
  EXPECT_EQ(error.worker(), "worker1");
}

// peer: faulty_agent_rpc_test.py remote_message_dropped_pickle: same: rejected immediately, with the failure
//   of the creation
TEST(RpcConformance, RemoteMessageDroppedPickle) {
  with_network(3, [](Worker& worker, SimCluster& cluster, Lives& lives) {
    cluster.network().drop_if(requests_of(rpc::kCreateRemote));
    auto tracked = worker.with({.timeout = milliseconds(500)}).remote("worker1", kMakeTracked);
    expect_no_creation(tracked);
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { worker.rpc_sync("worker2", kReadTracked, tracked); });
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { worker.rpc_sync("worker1", kReadTracked, tracked); });
    EXPECT_LT(now(worker) - begin, milliseconds(100)) << "refused at once, not after the caller's limit";
    EXPECT_EQ(lives.made, 0);
  });
}

// peer: faulty_agent_rpc_test.py udf_remote_message_dropped_timeout: same
TEST(RpcConformance, UdfRemoteMessageDroppedTimeout) {
  with_network(2, [](Worker& worker, SimCluster& cluster, Lives& lives) {
    cluster.network().drop_if(requests_of(rpc::kCreateRemote));
    auto sum = worker.with({.timeout = milliseconds(500)}).remote("worker1", kAdd, 1, 2);
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.creation().wait(); });
    const TimePoint begin = now(worker);
    for (int i = 0; i < 2; ++i) expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.to_here(); });
    EXPECT_EQ(now(worker), begin) << "a creation known to have failed is not fetched";
    EXPECT_FALSE(sum.confirmed_by_owner());
    EXPECT_EQ(lives.made, 0);
  });
}

// peer: faulty_agent_rpc_test.py builtin_remote_message_dropped_timeout: same
TEST(RpcConformance, BuiltinRemoteMessageDroppedTimeout) {
  with_network(2, [](Worker& worker, SimCluster& cluster, Lives&) {
    cluster.network().drop_if(requests_of(rpc::kCreateByOperator));
    auto sum = worker.with({.timeout = milliseconds(500)}).remote("worker1", "aten::add", {1, 2});
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.creation().wait(); });
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.to_here(); });
  });
}

// peer: faulty_agent_rpc_test.py (documented) to_here before the creation is known to have failed: same
TEST(RpcConformance, ToHereOfADroppedCreationEndsBeforeItIsKnown) {
  with_network(2, [](Worker& worker, SimCluster& cluster, Lives&) {
    cluster.network().drop_if(requests_of(rpc::kCreateRemote));
    auto sum = worker.with({.timeout = milliseconds(500)}).remote("worker1", kAdd, 1, 2);
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.to_here(milliseconds(100)); });
  });
}

void expect_late_creation_is_cleaned_up(bool reorder, std::string operator_name = "") {
  with_network(2, [&](Worker& worker, SimCluster& cluster, Lives& lives) {
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2),
              3);  // connected before messages may overtake each other
    cluster.network().set_options({.reorder = reorder});
    const bool udf = operator_name.empty();
    int late = 0;
    const auto creations = requests_of(udf ? rpc::kCreateRemote : rpc::kCreateByOperator);
    cluster.network().delay_if(
        [&](const net::SimMessage& message) { return creations(message) && ++late != 0; }, seconds(2));
    const Caller hurried = worker.with({.timeout = milliseconds(1)});
    {
      const auto tracked = udf ? hurried.remote("worker1", kMakeTracked) : RRef<Witness>();
      const auto sum = udf ? RRef<c10::IValue>() : hurried.remote("worker1", operator_name, {1, 2});
      if (udf) expect_no_creation(tracked);
      if (!udf) expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.creation().wait(); });
      if (!udf) expect_error(ErrorKind::kTimedOut, "worker1", [&] { sum.to_here(); });
      nap(worker, seconds(10));
      EXPECT_EQ(late, 1);
      EXPECT_EQ(lives.made, udf ? 1 : 0);
      EXPECT_EQ(lives.alive, 0);
      EXPECT_EQ(worker.rpc_sync("worker1", kCounted), 0);
    }
    nap(worker, seconds(1));
    EXPECT_EQ(worker.rpc_sync("worker1", kCounted), 0)
        << "the release of the reference does not create an entry";
    cluster.network().set_options({});
    cluster.network().delay_if({}, {});
  });
}

// peer: faulty_agent_rpc_test.py udf_remote_message_delay_timeout: better: also when the deletion overtakes
//   the creation
TEST(RpcConformance, UdfRemoteMessageDelayTimeout) {
  expect_late_creation_is_cleaned_up(false);
  expect_late_creation_is_cleaned_up(true);
}

// peer: faulty_agent_rpc_test.py remote_message_builtin_delay_timeout: better: also when the deletion
//   overtakes the creation
TEST(RpcConformance, RemoteMessageBuiltinDelayTimeout) {
  expect_late_creation_is_cleaned_up(false, "aten::add");
  expect_late_creation_is_cleaned_up(true, "aten::add");
}

// peer: faulty_agent_rpc_test.py udf_remote_message_delay_timeout_to_self: same
TEST(RpcConformance, UdfRemoteMessageDelayTimeoutToSelf) {
  with_network(1, [](Worker& worker, SimCluster&, Lives& lives) {
    auto tracked = worker.with({.timeout = milliseconds(500)}).remote(0, kMakeSlowly);
    expect_error(ErrorKind::kTimedOut, "worker0", [&] { tracked.local_value(); });
    nap(worker, seconds(5));
    expect_error(ErrorKind::kTimedOut, "worker0", [&] { tracked.creation().wait(); });
    EXPECT_EQ(lives.made, 1);
    EXPECT_EQ(lives.alive, 0);
    EXPECT_EQ(counted(worker), 0);
  });
}

// peer: faulty_agent_rpc_test.py remote_message_dropped_pickle_to_self,
//   builtin_remote_message_dropped_timeout_to_self, udf_remote_message_dropped_timeout_to_self: same: a
//   worker's messages to itself are never lost, but a creation that no thread starts in time ends the same
//   way
TEST(RpcConformance, CreationOnOneselfThatNeverBegins) {
  Lives lives;
  ClusterOptions options = world(lives, 2);
  options.threads = 1;
  testing::on_first(options, [&](Worker& worker) {
    lives = {};
    const auto busy = worker.rpc_async(0, kSleepASecond);
    nap(worker, milliseconds(10));
    const TimePoint begin = now(worker);
    {
      const auto tracked = worker.with({.timeout = milliseconds(500)}).remote(0, kMakeTracked);
      expect_error(ErrorKind::kTimedOut, "worker0", [&] { tracked.local_value(); });
      expect_error(ErrorKind::kTimedOut, "worker0", [&] { tracked.creation().wait(); });
      expect_error(ErrorKind::kTimedOut, "worker0", [&] { tracked.rpc_sync(kNumber); });
      expect_error(ErrorKind::kTimedOut, "worker0", [&] { worker.rpc_sync(1, kReadTracked, tracked); });
      EXPECT_EQ(now(worker) - begin, milliseconds(500));
      busy.wait();
      nap(worker, seconds(1));
      EXPECT_EQ(counted(worker), 0);
    }
    EXPECT_EQ(lives.made, 0);
    EXPECT_EQ(counted(worker), 0);
  });
}

// peer: faulty_agent_rpc_test.py (documented) a call on a reference whose creation failed: better: the
//   error keeps its kind
TEST(RpcConformance, CallOnAFailedCreationKeepsItsKind) {
  with_network(1, [](Worker& worker, SimCluster&, Lives&) {
    auto tracked = worker.with({.timeout = milliseconds(500)}).remote(0, kMakeSlowly);
    expect_error(ErrorKind::kTimedOut, "worker0", [&] { tracked.rpc_sync(kNumber); });
  });
}

// peer: faulty_agent_rpc_test.py (documented) a slow creation that its creator gives up: same
TEST(RpcConformance, SlowCreationIsCleanedUpAfterItsTimeout) {
  with_network(2, [](Worker& worker, SimCluster&, Lives& lives) {
    {
      auto tracked = worker.with({.timeout = milliseconds(500)}).remote("worker1", kMakeSlowly);
      expect_no_creation(tracked);
    }
    nap(worker, seconds(10));
    EXPECT_EQ(lives.made, 1);
    EXPECT_EQ(lives.alive, 0);
  });
}

/// Values are destroyed on threads that may wait, so the worker's own data must not hold the last reference.
TEST(RpcConformance, ValueEndsWithItsReferencesDespiteACallOnIt) {
  with_network(1, [](Worker& worker, SimCluster&, Lives& lives) {
    auto tracked = worker.remote(0, kMakeTracked);
    auto& core = static_cast<rpc::RpcAgent&>(*worker.backend());
    auto call = worker.rpc_async(0, kReadSlowly, tracked);
    nap(worker, milliseconds(100));
    const auto kept = core.serving().all();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(call.wait(), 35);
    tracked = {};
    nap(worker, seconds(1));
    EXPECT_EQ(lives.made, 1);
    EXPECT_EQ(lives.alive, 0);
  });
}

/// Shuts every worker down; returns what that threw.
std::vector<std::exception_ptr> shut_down_after(SimCluster& cluster,
                                                const std::function<void(Worker&)>& first) {
  return cluster.try_services([&](rpc::WorkerService& service) {
    if (service.worker().rank() == 0) first(service.worker());
    service.shutdown(cluster.executor().deadline_in(std::chrono::minutes(5)));
  });
}

// peer: rpc_test.py/rref use_rref_after_shutdown: same
TEST(RpcConformance, UseRrefAfterShutdown) {
  Lives lives;
  SimCluster cluster(world(lives, 2));
  RRef<Witness> outlives;
  const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    RRef<Witness> tracked;
    RRef<std::int64_t> sum;
    if (worker.rank() == 0) {
      tracked = worker.remote("worker1", kMakeTracked);
      sum = worker.remote("worker1", kAdd, 1, 2);
      EXPECT_EQ(tracked.rpc_sync(kNumber), 35);
    }
    service.shutdown();
    if (worker.rank() != 0) return;
    expect_error(ErrorKind::kCancelled, "shut down", [&] { sum.to_here(); });
    expect_error(ErrorKind::kCancelled, "shut down", [&] { tracked.rpc_sync(kNumber); });
    expect_error(ErrorKind::kCancelled, "shut down", [&] { worker.rpc_sync("worker1", kSame, tracked); });
    outlives = tracked;
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
  expect_error(ErrorKind::kCancelled, "shut down", [&] { outlives.rpc_sync(kNumber); });
  EXPECT_EQ(lives.made, 1);
  EXPECT_EQ(lives.alive, 0);
}

/// A value that holds a reference to a value that holds a reference, and the program keeps both ends.
// peer: rpc_test.py/rref non_garbage_collected_user_rref_due_to_local_circular_dependency: same
TEST(RpcConformance, NonGarbageCollectedUserRrefDueToLocalCircularDependency) {
  struct Ring {
    std::shared_ptr<Ring> self;
    RRef<Witness> tracked;
  };
  Lives lives;
  SimCluster cluster(world(lives));
  auto ring = std::make_shared<Ring>();
  ring->self = ring;
  const auto failures = shut_down_after(cluster, [&](Worker& worker) {
    ring->tracked = worker.remote("worker1", kMakeTracked);
    auto keeper = worker.remote("worker2", kKeeper, ring->tracked);
    keeper.creation().wait();
    EXPECT_EQ(ring->tracked.rpc_sync(kNumber), 35);
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
  EXPECT_EQ(lives.made, 1);
  EXPECT_EQ(lives.alive, 0);
  ring->self.reset();
}

}  // namespace
}  // namespace torchspan::rpc_rref_faults
