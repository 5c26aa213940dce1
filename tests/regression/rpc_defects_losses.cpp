// Regressions: references that a broken connection made doubtful, and messages given up too early.
#include "rpc/agent/agent.h"
#include "rpc/references/control.h"
#include "tests/regression/rpc_defects.h"

namespace torchspan::rpc_defects_losses {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)
using Number = RRef<std::int64_t>;

rpc::References& references_of(const Worker& worker) {
  return static_cast<rpc::RpcAgent&>(*worker.backend()).references();
}
std::int64_t seven() { return 7; }
std::int64_t how_many(const std::vector<Number>& all) { return static_cast<std::int64_t>(all.size()); }
/// The next reference that this worker sends has the number after this one.
std::int64_t last_number(Worker& worker) {
  return static_cast<std::int64_t>(worker.backend()->next_id().local);
}
GlobalId fork_of(std::uint32_t rank, std::int64_t number) {
  return {rank, static_cast<std::uint64_t>(number)};
}
/// Worker 0 asks whether a reference has arrived; the answer is no.
bool misses(Worker& worker, std::int64_t number) {
  return references_of(worker).driver().on_fork_audit({fork_of(0, number)}, {0, 0}).size() == 1;
}

constexpr Function<seven> kSeven{"seven"};
constexpr Function<how_many> kHowMany{"how_many"};
constexpr Function<last_number> kLastNumber{"last_number"};
constexpr Function<misses> kMisses{"misses"};

ClusterOptions lossy_world(Marks& marks, int workers) {
  ClusterOptions options = world(marks, workers);
  options.functions.add(kSeven, kHowMany, kLastNumber, kMisses);
  return options;
}

TEST(RpcDefects, MessageWithOneLostReferenceReturnsTheOthers) {
  for (const int lost : {1, 2, 3}) {
    Marks marks;
    first(lossy_world(marks, 3), [&](Worker& worker, SimCluster&) {
      std::vector<Number> numbers(3);
      for (Number& number : numbers) {
        number = worker.remote(2, kSeven);
        number.creation().wait();
      }
      worker.rpc_sync(1, kSleepMs, 1);
      const std::int64_t number = last_number(worker) + lost;
      EXPECT_TRUE(worker.rpc_sync(1, kMisses, number));
      try {
        worker.rpc_sync(1, kHowMany, numbers);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      }
      // Worker 1's message about the first reference reaches worker 0.
      references_of(worker).undo({{2, numbers[0].state()->value_id(), fork_of(0, number), 0, 0}});
      nap(worker, seconds(60));
      EXPECT_EQ(worker.debug().references.pending_children, 0u) << worker.debug().str();
      EXPECT_EQ(worker.rpc_sync(1, kHowMany, numbers), 3);
    });
  }
}

TEST(RpcDefects, LateReplyWithALostReferenceKeepsTheConnection) {
  Marks marks;
  first(lossy_world(marks, 2), [](Worker& worker, SimCluster&) {
    const std::int64_t number = worker.rpc_sync(1, kLastNumber) + 1;
    auto bystander = worker.rpc_async(1, kSleepMs, 2000);
    EXPECT_THROW(worker.with({.timeout = milliseconds(100)}).rpc_sync(1, kMakeLate, 300), Error);
    EXPECT_EQ(references_of(worker).driver().on_fork_audit({fork_of(1, number)}, {1, 0}).size(), 1u);
    EXPECT_NO_THROW(bystander.wait());
    EXPECT_EQ(worker.debug().late_replies, 1u);
  });
}

TEST(RpcDefects, ServerThatShutsDownFirstGivesNoMessageUp) {
  Marks marks;
  SimCluster cluster(lossy_world(marks, 3));
  const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    if (worker.rank() == 0) {  // the others serve while worker 0 waits
      nap(worker, seconds(1));
      const Number number = worker.remote(2, kSeven);
      number.creation().wait();
      cluster.network().drop_if(testing::requests_of(rpc::ChildAccept::kType));
      worker.rpc_sync(1, kHowMany, std::vector<Number>{number});
      nap(worker, std::chrono::minutes(5));
      EXPECT_EQ(worker.debug().references.pending_children, 1u);
      cluster.network().drop_if({});
      nap(worker, seconds(30));
      EXPECT_EQ(worker.debug().references.pending_children, 0u) << worker.debug().str();
    }
    service.shutdown(cluster.executor().deadline_in(std::chrono::minutes(15)));
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

}  // namespace
}  // namespace torchspan::rpc_defects_losses
