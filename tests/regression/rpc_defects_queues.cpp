// Regressions: messages that were refused because a peer's queue was full, and then never resent.
#include "rpc/references/control.h"
#include "tests/regression/rpc_defects.h"

namespace torchspan::rpc_defects_queues {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)

std::int64_t size_of(const at::Tensor& tensor) { return tensor.numel(); }
at::Tensor late_zeros(Worker& worker, std::int64_t bytes, std::int64_t ms) {
  sleep_ms(worker, ms);
  return at::zeros({bytes}, at::kByte);
}
/// Values on this worker that others refer to, and references kept for copies in transit.
std::int64_t values(Worker& worker) { return static_cast<std::int64_t>(worker.debug().references.owners); }
std::int64_t parents(Worker& worker) {
  return static_cast<std::int64_t>(worker.debug().references.pending_children);
}

constexpr Function<size_of> kSizeOf{"size_of"};
constexpr Function<late_zeros> kLateZeros{"late_zeros"};
constexpr Function<values> kValues{"values"};
constexpr Function<parents> kParents{"parents"};

/// A connection between three workers holds one mebibyte, and no more while its network is cut.
void on_first(const std::function<void(Worker&, SimCluster&)>& body) {
  Marks marks;
  ClusterOptions options = world(marks, 3);
  options.functions.add(kSizeOf, kLateZeros, kValues, kParents);
  options.max_unsent = 1 << 20;
  first(options, [&](Worker& worker, SimCluster& cluster) {
    for (int other = 1; other < 3; ++other) worker.rpc_sync(other, kSleepMs, 1);
    body(worker, cluster);
  });
}

/// Fills the queue until even the smallest message is refused.
void fill_queue(Worker& worker, int to) {
  for (const std::int64_t size : {200 << 10, 10 << 10, 100}) {
    while (!worker.rpc_async(to, kSizeOf, at::zeros({size}, at::kByte)).done()) continue;
  }
  Future<void> refused;
  do {
    refused = worker.rpc_async(to, kMark);
  } while (!refused.done());
  EXPECT_EQ(to_error(refused.error()).kind(), ErrorKind::kOverloaded);
}

TEST(RpcDefects, DeletionThatFindsNoRoomIsSentAgain) {
  on_first([](Worker& worker, SimCluster& cluster) {
    auto cell = worker.remote(1, kCell);
    EXPECT_EQ(cell.rpc_sync(kGet), 7);
    cluster.network().cut("worker0", "worker1");
    fill_queue(worker, 1);
    cell = {};
    nap(worker, seconds(1));
    cluster.network().heal("worker0", "worker1");
    nap(worker, seconds(60));
    EXPECT_EQ(worker.rpc_sync(1, kValues), 0);
  });
}

TEST(RpcDefects, AcceptanceThatFindsNoRoomIsSentAgain) {
  on_first([](Worker& worker, SimCluster& cluster) {
    const auto cell = worker.remote(2, kCell);
    const auto keeper = worker.remote(1, kKeeper, cell);
    keeper.creation().wait();
    cluster.network().cut("worker2", "worker0");  // the owner does not answer yet
    const auto copy = worker.call_on(keeper, kKeptLate, 0).wait();
    cluster.network().cut("worker0", "worker1");
    fill_queue(worker, 1);
    cluster.network().heal("worker2", "worker0");
    nap(worker, seconds(1));
    cluster.network().heal("worker0", "worker1");
    nap(worker, seconds(60));
    EXPECT_EQ(worker.rpc_sync(1, kParents), 0);
  });
}

TEST(RpcDefects, ReplyThatFindsNoRoomFailsItsCallInTheEnd) {
  on_first([](Worker& worker, SimCluster& cluster) {
    std::vector<Future<at::Tensor>> calls;
    const auto patient = worker.with({.timeout = Duration::zero()});
    for (int i = 0; i < 20; ++i) calls.push_back(patient.rpc_async(1, kLateZeros, 200 << 10, 100));
    for (int i = 0; i < 500; ++i) calls.push_back(patient.rpc_async(1, kLateZeros, 1000, 100));
    nap(worker, milliseconds(50));
    cluster.network().cut("worker0", "worker1");
    nap(worker, seconds(30));
    cluster.network().heal("worker0", "worker1");
    nap(worker, seconds(10));
    std::size_t refused = 0;
    for (const auto& call : calls) {
      ASSERT_TRUE(call.done()) << "its caller would wait forever";
      if (!call.error()) continue;
      EXPECT_EQ(to_error(call.error()).kind(), ErrorKind::kOverloaded) << describe(call.error()).text;
      ++refused;
    }
    EXPECT_GT(refused, 0u);
    EXPECT_LT(refused, calls.size());
  });
}

}  // namespace
}  // namespace torchspan::rpc_defects_queues
