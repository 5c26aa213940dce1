// Tests the first calls to workers that are members and cannot be reached for a while.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"

namespace torchspan::rpc::connect_test {
namespace {

using std::chrono::seconds;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SimCluster;

std::int64_t twice(std::int64_t number) { return 2 * number; }
/// 8 bytes for each number that travels beside the message.
std::int64_t sum(const at::Tensor& numbers) { return numbers.sum().item<std::int64_t>(); }
std::int64_t read(const RRef<std::int64_t>& number) { return number.local_value(); }
constexpr Function<twice> kTwice{"twice"};
constexpr Function<sum> kSum{"sum"};
constexpr Function<read> kRead{"read"};

/// Runs `body` on worker0 while its messages do not reach worker1, whose heartbeats reach rank 0 all the time.
void while_cut(Duration connect_timeout, const std::function<void(SimCluster&, Worker&)>& body) {
  ClusterOptions options;
  options.functions.add(kTwice, kSum, kRead);
  options.service.connect_timeout = connect_timeout;
  SimCluster world(std::move(options));
  world.network().cut("worker0", "worker1");
  world.try_services([&](WorkerService& service) {
    if (service.worker().rank() == 0) {
      body(world, service.worker());
      world.network().heal("worker0", "worker1");
    }
    service.shutdown(world.executor().deadline_in(std::chrono::minutes(2)));
  });
}

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kInvalid, ""};
}

TEST(FirstCall, ConnectsAgainUntilItsDeadlineWhileTheWorkerIsAMember) {
  while_cut(Duration::zero(), [](SimCluster& world, Worker& worker) {
    const auto first = worker.rpc_async(1, kTwice, 4);
    const auto second = worker.rpc_async(1, kTwice, 5);
    const auto value = worker.remote(1, kTwice, 6);
    const auto through = worker.rpc_async(1, kRead, value);
    const auto timer = world.executor().make_parker();
    timer->park(world.executor().deadline_in(seconds(23)));
    EXPECT_FALSE(first.done());
    world.network().heal("worker0", "worker1");
    EXPECT_EQ(first.wait(), 8);
    EXPECT_EQ(second.wait(), 10);
    EXPECT_EQ(value.to_here(), 12);
    EXPECT_EQ(through.wait(), 12);
    EXPECT_EQ(worker.rpc_sync(1, kTwice, 7), 14);
  });
}

TEST(FirstCall, SendsTheTensorsOfTheCallAgainAndNotWhatBecameOfThem) {
  while_cut(Duration::zero(), [](SimCluster& world, Worker& worker) {
    at::Tensor changed = at::ones({1 << 16}, at::kLong);
    at::Tensor freed = at::ones({1 << 16}, at::kLong);
    const auto first = worker.rpc_async(1, kSum, changed);
    const auto second = worker.rpc_async(1, kSum, freed);
    const auto third = worker.rpc_async(1, kSum, freed.slice(0, 0, 8));
    changed.zero_();
    freed.zero_();  // whoever reads it after its end reads no ones
    freed.reset();
    const auto timer = world.executor().make_parker();
    timer->park(world.executor().deadline_in(seconds(13)));
    EXPECT_FALSE(first.done());
    world.network().heal("worker0", "worker1");
    EXPECT_EQ(first.wait(), 1 << 16);
    EXPECT_EQ(second.wait(), 1 << 16);
    EXPECT_EQ(third.wait(), 8);
  });
}

TEST(FirstCall, FailsAtItsDeadlineAndSaysThatTheWorkerIsAMember) {
  while_cut(Duration::zero(), [](SimCluster& world, Worker& worker) {
    const TimePoint start = world.executor().now();
    const Error error = error_of([&] { worker.with({.timeout = seconds(20)}).rpc_sync(1, kTwice, 4); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_NEAR(to_seconds(world.executor().now() - start), 20, 0.1);
    EXPECT_THAT(error.what(), HasSubstr("no connection to the worker, which is a member"));
    EXPECT_THAT(error.what(), HasSubstr("did not finish the handshake in time"));
    EXPECT_THAT(error.what(), Not(HasSubstr("died")));
  });
}

TEST(FirstCall, WaitsForAConnectionNoLongerThanTheOptionAllows) {
  while_cut(seconds(12), [](SimCluster& world, Worker& worker) {
    const TimePoint start = world.executor().now();
    const Error error = error_of([&] { worker.rpc_sync(1, kTwice, 4); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_LE(to_seconds(world.executor().now() - start), 16);
    EXPECT_THAT(error.what(), HasSubstr("WorkerOptions::connect_timeout (12.0 s)"));
  });
}

TEST(FirstCall, EndsAtOnceWhenTheWorkerDies) {
  while_cut(Duration::zero(), [](SimCluster& world, Worker& worker) {
    const auto call = worker.rpc_async(1, kTwice, 4);
    const auto timer = world.executor().make_parker();
    timer->park(world.executor().deadline_in(seconds(8)));
    const TimePoint death = world.executor().now();
    world.kill(1);
    EXPECT_EQ(error_of([&] { call.wait(); }).kind(), ErrorKind::kDisconnected);
    EXPECT_LE(to_seconds(world.executor().now() - death), 1);
  });
}

TEST(FirstCall, CanBeCancelledWhileItConnects) {
  while_cut(Duration::zero(), [](SimCluster& world, Worker& worker) {
    std::stop_source stop;
    const auto call = worker.with({.stop = stop.get_token()}).rpc_async(1, kTwice, 4);
    const auto timer = world.executor().make_parker();
    timer->park(world.executor().deadline_in(seconds(8)));
    stop.request_stop();
    EXPECT_EQ(error_of([&] { call.wait(); }).kind(), ErrorKind::kCancelled);
  });
}

}  // namespace
}  // namespace torchspan::rpc::connect_test
