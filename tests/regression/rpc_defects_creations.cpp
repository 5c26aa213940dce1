// Regressions: creations that fail before they begin; owners once waited for them forever.
#include "rpc/agent/agent.h"
#include "tests/regression/rpc_defects.h"

namespace torchspan::rpc_defects_creations {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)
using Number = RRef<std::int64_t>;

std::int64_t raise() { throw std::domain_error("Expected error"); }
std::int64_t next(const Number& number) { return number.to_here() + 1; }
std::int64_t read(const Number& number) { return number.to_here(); }
/// Values on this worker that others refer to.
std::int64_t values(Worker& worker) { return static_cast<std::int64_t>(worker.debug().references.owners); }
std::int64_t remembered(Worker& worker) {
  return static_cast<std::int64_t>(
      static_cast<rpc::RpcAgent&>(*worker.backend()).references().counts().remembered);
}

constexpr Function<raise> kRaise{"raise"};
constexpr Function<next> kNext{"next"};
constexpr Function<read> kRead{"read"};
constexpr Function<values> kValues{"values"};
constexpr Function<remembered> kRemembered{"remembered"};

/// Worker 0 runs `body` after it has exchanged a message with all others.
void on_first(int workers, const std::function<void(Worker&, SimCluster&)>& body) {
  Marks marks;
  ClusterOptions options = world(marks, workers);
  options.functions.add(kRaise, kNext, kRead, kValues, kRemembered);
  first(options, [&](Worker& worker, SimCluster& cluster) {
    for (int other = 1; other < workers; ++other) worker.rpc_sync(other, kSleepMs, 1);
    body(worker, cluster);
  });
}

template <class F>
void expect_the_reason(Worker& worker, F&& use) {
  const TimePoint begin = worker.runtime().executor.now();
  try {
    use();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure) << error.what();
    EXPECT_NE(error.message().find("Expected error"), std::string::npos) << error.what();
  }
  EXPECT_LT(worker.runtime().executor.now() - begin, seconds(1)) << "it fails when the creation does";
}

TEST(RpcDefects, CreationOfWhichAnArgumentFailedFailsForItsCreator) {
  for (const int owner : {1, 2}) {  // the owner of the argument
    on_first(3, [&](Worker& worker, SimCluster&) {
      {
        const auto argument = worker.remote(owner, kRaise);
        const auto made = worker.remote(1, kNext, argument);
        expect_the_reason(worker, [&] { made.to_here(); });
      }
      nap(worker, seconds(30));
      EXPECT_EQ(worker.rpc_sync(1, kValues), 0);
      EXPECT_EQ(worker.rpc_sync(2, kValues), 0);
    });
  }
}

TEST(RpcDefects, CreationOfWhichAnArgumentFailedFailsForOthers) {
  for (const int user : {0, 1, 2}) {
    on_first(3, [&](Worker& worker, SimCluster&) {
      {
        const auto argument = worker.remote(1, kRaise);
        const auto made = worker.remote(1, kNext, argument);
        const auto call = worker.with({.timeout = Duration::zero()}).rpc_async(user, kRead, made);
        expect_the_reason(worker, [&] { call.wait(std::chrono::minutes(10)); });
      }
      nap(worker, seconds(30));
      EXPECT_EQ(worker.rpc_sync(1, kValues), 0);
    });
  }
}

TEST(RpcDefects, CreationOfWhichAnArgumentFailedFailsForOthersLater) {
  on_first(3, [](Worker& worker, SimCluster& cluster) {
    {
      const auto made = worker.remote(1, kNext, worker.remote(1, kRaise));
      cluster.network().cut("worker2", "worker1");  // its request arrives after everything else
      const auto call = worker.rpc_async(2, kRead, made);
      nap(worker, seconds(5));
      EXPECT_THROW(made.creation().wait(), Error);
      cluster.network().heal("worker2", "worker1");
      expect_the_reason(worker, [&] { call.wait(); });
    }
    nap(worker, seconds(30));
    EXPECT_EQ(worker.rpc_sync(1, kValues), 0);
  });
}

TEST(RpcDefects, CreationsThatWereNeverSentCostTheOwnerNothing) {
  on_first(2, [](Worker& worker, SimCluster&) {
    const auto argument = worker.remote(1, kRaise);
    EXPECT_THROW(argument.creation().wait(), Error);
    for (int i = 0; i < 400; ++i) {
      const auto refused = worker.remote(1, kNext, argument);
      expect_the_reason(worker, [&] { refused.to_here(); });
      worker.remote(1, kCell).creation().wait();
    }
    nap(worker, seconds(10));
    // One interval of numbers, and the latest reasons, of which a limited number is kept.
    EXPECT_EQ(worker.rpc_sync(1, kValues), 1) << "the argument";
    EXPECT_LT(worker.rpc_sync(1, kRemembered), 300);
  });
}

}  // namespace
}  // namespace torchspan::rpc_defects_creations
