#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"

namespace torchspan::worker_test {
namespace {

using testing::ClusterOptions;
using testing::SimCluster;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
at::Tensor scale(const at::Tensor& x, double by) { return x * by; }
void nothing() {}
void fail(const std::string& text) { throw std::runtime_error(text); }
std::string get_name(Worker& worker) { return worker.name(); }
std::int64_t hop(Worker& worker, std::int64_t left);
Task<std::int64_t> coroutine_hop(Worker& worker, std::int64_t left);
Future<std::int64_t> async_add(Worker& worker, std::int64_t a, std::int64_t b);

struct Counter_ {
  explicit Counter_(std::int64_t start) : value(start) {}
  std::int64_t add(std::int64_t by) { return value += by; }
  std::int64_t get() const { return value; }
  std::int64_t value;
};
std::int64_t read_counter(const RRef<Counter_>& counter) { return counter.local_value().get(); }
std::int64_t read_through(Worker& worker, const RRef<Counter_>& counter);

constexpr Function<add> kAdd{"add"};
constexpr Function<scale> kScale{"scale"};
constexpr Function<nothing> kNothing{"nothing"};
constexpr Function<fail> kFail{"fail"};
constexpr Function<get_name> kWorkerName{"get_name"};
constexpr Function<hop> kHop{"hop"};
constexpr Function<coroutine_hop> kCoroutineHop{"coroutine_hop"};
constexpr Function<async_add> kAsyncAdd{"async_add"};
Future<std::int64_t> no_future() { return {}; }
constexpr Function<no_future> kNoFuture{"no_future"};
void sleep_ten_seconds(Worker& worker) { worker.runtime().executor.sleep(std::chrono::seconds(10)); }
constexpr Function<sleep_ten_seconds> kSleep{"sleep_ten_seconds"};
constexpr Class<Counter_, std::int64_t> kCounter{"Counter"};
constexpr Function<&Counter_::add> kCounterAdd{"Counter.add"};
constexpr Function<&Counter_::get> kCounterGet{"Counter.get"};
constexpr Function<read_counter> kReadCounter{"read_counter"};
constexpr Function<read_through> kReadThrough{"read_through"};

std::int64_t hop(Worker& worker, std::int64_t left) {
  if (left == 0) return 0;
  return 1 + worker.rpc_sync((worker.rank() + 1) % worker.world_size(), kHop, left - 1);
}

Task<std::int64_t> coroutine_hop(Worker& worker, std::int64_t left) {
  if (left == 0) co_return 0;
  co_return 1 + co_await worker.rpc_async((worker.rank() + 1) % worker.world_size(), kCoroutineHop, left - 1);
}

Future<std::int64_t> async_add(Worker& worker, std::int64_t a, std::int64_t b) {
  return worker.rpc_async((worker.rank() + 1) % worker.world_size(), kAdd, a, b);
}

std::int64_t read_through(Worker&, const RRef<Counter_>& counter) { return counter.rpc_sync(kCounterGet); }

ClusterOptions cluster(int workers, std::uint64_t seed = 1) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions.add(kAdd, kScale, kNothing, kFail, kWorkerName, kHop, kCoroutineHop, kAsyncAdd, kNoFuture,
                        kCounter, kCounterAdd, kCounterGet, kReadCounter, kReadThrough, kSleep);
  return options;
}

/// Runs `body` on worker 0 of a simulated world.
void on_first(int workers, std::uint64_t seed, const std::function<void(Worker&)>& body) {
  SimCluster world(cluster(workers, seed));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}

TEST(Worker, CallsAFunctionOnAnotherWorkerAndOnItself) {
  on_first(2, 1, [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 2, 3), 5);
    EXPECT_EQ(worker.rpc_sync(0, kAdd, 20, 3), 23);
    EXPECT_EQ(worker.rpc_sync(WorkerInfo{"worker1", 1}, kWorkerName), "worker1");
    worker.rpc_sync(1, kNothing);
  });
}

TEST(Worker, CarriesTensorsBothWays) {
  on_first(2, 1, [](Worker& worker) {
    const at::Tensor x = at::arange(12, at::kDouble).reshape({3, 4}).t();
    const at::Tensor y = worker.rpc_sync("worker1", kScale, x, 2.5);
    EXPECT_TRUE(at::equal(y, x * 2.5));
    EXPECT_EQ(y.strides(), x.strides());
  });
}

TEST(Worker, CountsTheBytesOfFramesAndTensorsThatItSends) {
  on_first(2, 1, [](Worker& worker) {
    const Counter& sent = worker.runtime().metrics.counter("rpc.bytes_sent");
    const auto bytes_of = [&](std::int64_t numbers) {
      const std::uint64_t before = sent.value();
      worker.rpc_sync(1, kScale, at::ones({numbers}), 2.0);
      return static_cast<double>(sent.value() - before);
    };
    const double least = bytes_of(1);
    EXPECT_GT(least, 20);
    EXPECT_LT(least, 400);
    EXPECT_NEAR(bytes_of(10'001) - least, 40'000, 16);
  });
}

TEST(Worker, CapturesArgumentsWhenTheCallIsMade) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor x = at::ones({1000});
    auto y = worker.rpc_async("worker1", kScale, x, 3.0);
    auto z = worker.rpc_async(0, kScale, x, 3.0);
    x.zero_();
    EXPECT_TRUE(at::equal(y.wait(), at::full({1000}, 3.0)));
    EXPECT_TRUE(at::equal(z.wait(), at::full({1000}, 3.0)));
  });
}

TEST(Worker, ReportsTypeTextWorkerAndPlaceOfARemoteException) {
  on_first(2, 1, [](Worker& worker) {
    try {
      worker.rpc_sync("worker1", kFail, "the disk\nis on fire");
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_EQ(error.call(), "fail");
      ASSERT_EQ(error.frames().size(), 1u);
      EXPECT_EQ(error.frames()[0].type, "std::runtime_error");
      EXPECT_EQ(error.frames()[0].text, "the disk\nis on fire");
      EXPECT_EQ(error.frames()[0].worker, "worker1");
      EXPECT_THAT(error.what(), ::testing::HasSubstr("worker_test.cpp:"));
    }
  });
}

TEST(Worker, NamesTheFunctionThatReturnsAnEmptyFuture) {
  on_first(2, 1, [](Worker& worker) {
    for (const char* to : {"worker0", "worker1"}) {
      try {
        worker.rpc_sync(to, kNoFuture);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("no_future"),
                                                   ::testing::HasSubstr("returned an empty Future")));
      }
    }
  });
}

TEST(Worker, ListsTheWorkersWhenADestinationDoesNotExist) {
  on_first(3, 1, [](Worker& worker) {
    for (const Destination& to : {Destination("worker9"), Destination(3), Destination(-1)}) {
      try {
        worker.rpc_sync(to, kNothing);
        FAIL() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("'worker2' (2)"));
      }
    }
  });
}

TEST(Worker, RefusesATokenThatIsNotInTheTable) {
  static constexpr Function<add> kUnlisted{"unlisted"};
  on_first(2, 1, [](Worker& worker) {
    try {
      worker.rpc_sync("worker1", kUnlisted, 1, 2);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("'unlisted'"));
    }
  });
}

// peer: rpc/more nested calls never starve: the pool grows while handlers wait, up to a limit: better
TEST(Worker, NestsCallsDeeperThanItsPoolHasThreads) {
  ClusterOptions options = cluster(2, 3);
  options.threads = 1;
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    EXPECT_EQ(worker.rpc_sync("worker1", kHop, 20), 20);
    EXPECT_EQ(worker.rpc_sync("worker1", kCoroutineHop, 20), 20);
    EXPECT_EQ(worker.rpc_sync("worker1", kAsyncAdd, 4, 5), 9);
  });
}

TEST(Worker, CallsOperatorsBySchema) {
  on_first(2, 1, [](Worker& worker) {
    const at::Tensor x = at::ones({3});
    const c10::IValue sum = worker.rpc_sync("worker1", "aten::add", {x, x}, {{"alpha", 2}});
    EXPECT_TRUE(at::equal(sum.toTensor(), at::full({3}, 3.0)));
    EXPECT_TRUE(at::equal(worker.rpc_sync(1, "aten::add.Scalar", {x, 4}).toTensor(), at::full({3}, 5.0)));
    EXPECT_THROW(worker.rpc_sync(1, "aten::mm", {"no", "matrices"}), Error);
    EXPECT_THROW(worker.rpc_sync(1, "aten::no_such_operator", {x}), Error);
    auto rref = worker.remote(1, "aten::mul", {x, x});
    EXPECT_TRUE(at::equal(rref.to_here().toTensor(), x));
  });
}

TEST(Worker, TimesOutInVirtualTimeAndGoesOn) {
  on_first(2, 1, [](Worker& worker) {
    const auto before = worker.runtime().executor.now();
    Caller hurried = worker.with({.timeout = std::chrono::nanoseconds(1000)});
    try {
      hurried.rpc_sync("worker1", kNothing);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
    }
    EXPECT_LT(worker.runtime().executor.now() - before, std::chrono::milliseconds(1));
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 1), 2);
  });
}

TEST(RRef, CreatesUsesAndFetchesRemoteObjects) {
  on_first(3, 1, [](Worker& worker) {
    auto counter = worker.remote("worker1", kCounter, 40);
    EXPECT_FALSE(counter.is_owner());
    EXPECT_EQ(counter.owner_name(), "worker1");
    EXPECT_EQ(counter.rpc_sync(kCounterAdd, 2), 42);
    EXPECT_EQ(counter.rpc_sync(kReadCounter), 42);
    EXPECT_EQ(counter.remote(kCounterGet).to_here(), 42);
    EXPECT_EQ(worker.rpc_sync("worker2", kReadThrough, counter), 42);
    EXPECT_EQ(worker.remote("worker1", kAdd, 1, 2).to_here(), 3);
    EXPECT_THROW(counter.local_value(), Error);
  });
}

TEST(RRef, WorksForValuesOwnedByTheirMaker) {
  on_first(2, 1, [](Worker& worker) {
    RRef<Counter_> mine(worker, Counter_(7));
    EXPECT_TRUE(mine.is_owner());
    EXPECT_EQ(mine.local_value().get(), 7);
    EXPECT_EQ(worker.rpc_sync("worker1", kReadThrough, mine), 7);
    auto self_made = worker.remote(0, kCounter, 5);
    EXPECT_TRUE(self_made.is_owner());
    EXPECT_EQ(self_made.rpc_sync(kCounterAdd, 1), 6);
    EXPECT_EQ(RRef<std::int64_t>(worker, 3).to_here(), 3);
  });
}

TEST(RRef, DeliversTheFailureOfItsCreationAtFirstUse) {
  on_first(2, 1, [](Worker& worker) {
    auto broken = worker.remote("worker1", kFail, "no such luck");
    try {
      broken.to_here();
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("no such luck"));
    }
  });
}

TEST(Worker, TimesOutCallsToItselfInAWorldOfOne) {
  on_first(1, 1, [](Worker& worker) {
    try {
      worker.with({.timeout = std::chrono::seconds(5)}).rpc_sync(0, kSleep);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
    }
  });
}

TEST(RRef, RefusesToBeUsedWhenItIsEmpty) {
  on_first(2, 1, [](Worker& worker) {
    const RRef<Counter_> empty;
    EXPECT_THROW(empty.rpc_sync(kCounterGet), Error);
    EXPECT_THROW(empty.local_value(), Error);
    EXPECT_THROW(empty.is_owner(), Error);
    EXPECT_EQ(empty.str(), "RRef(empty)");
    EXPECT_THROW(worker.rpc_sync("worker1", kReadCounter, empty), Error);
  });
}

TEST(Worker, GathersAndSynchronizesOverSubsets) {
  SimCluster world(cluster(4, 2));
  world.run([](Worker& worker) {
    const Bytes mine{std::byte(worker.rank())};
    auto all = worker.all_gather_bytes(mine);
    ASSERT_EQ(all.size(), 4u);
    EXPECT_EQ(all[3], Bytes{std::byte(3)});
    if (worker.rank() == 0 || worker.rank() == 3) {
      const auto two = worker.all_gather_bytes(mine, {"worker3", "worker0"});
      EXPECT_EQ(two, (std::vector<Bytes>{{std::byte(3)}, {std::byte(0)}})) << "in the order asked for";
    }
    if (worker.rank() % 2 == 0) {
      worker.barrier({"worker0", "worker2"});
    } else {
      worker.barrier({"worker1", "worker3"});
    }
  });
}

TEST(Worker, GathersInWorldsOfManyRanks) {
  constexpr int kMany = 48;
  SimCluster world(cluster(kMany, 2));
  world.run([](Worker& worker) {
    worker.barrier();
    const auto all = worker.all_gather_bytes({std::byte(worker.rank())});
    ASSERT_EQ(all.size(), static_cast<std::size_t>(kMany));
    for (int rank = 0; rank < kMany; ++rank)
      EXPECT_EQ(all[static_cast<std::size_t>(rank)], Bytes{std::byte(rank)});
  });
}

TEST(Worker, FailsTheCallsToAWorkerThatDiesAndServesTheOthers) {
  ClusterOptions options = cluster(3, 4);
  options.graceful = false;
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 1) world.executor().sleep(std::chrono::seconds(2));
    if (worker.rank() == 2) world.executor().sleep(std::chrono::seconds(3));
    if (worker.rank() != 0) return;
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 1), 2);
    world.network().block(
        [](const net::SimMessage& m) { return m.to == "sim:worker0" && m.from == "sim:worker1"; });
    auto pending = worker.rpc_async("worker1", kAdd, 1, 1);
    world.executor().sleep(std::chrono::milliseconds(1));
    world.kill(1);
    const auto died = world.executor().now();
    try {
      pending.wait();
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
      EXPECT_EQ(error.worker(), "worker1");
    }
    EXPECT_LT(world.executor().now() - died, std::chrono::seconds(1));
    EXPECT_EQ(worker.rpc_sync("worker2", kAdd, 1, 1), 2);
    EXPECT_THROW(worker.rpc_sync("worker1", kAdd, 1, 1), Error);
  });
}

// peer: rpc/more calls run on a simulated network and clock, the same under every seed: better
TEST(Worker, RunsRandomTrafficTheSameUnderEverySeed) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SimCluster world(cluster(3, seed));
    world.run([&](Worker& worker) {
      auto counter = worker.remote((worker.rank() + 1) % 3, kCounter, 0);
      std::vector<Future<std::int64_t>> calls;
      for (int i = 0; i < 10; ++i) calls.push_back(counter.rpc_async(kCounterAdd, i));
      for (int i = 0; i < 5; ++i)
        calls.push_back(worker.rpc_async((worker.rank() + 2) % 3, kReadThrough, counter));
      for (auto& call : calls) call.wait();
      EXPECT_EQ(counter.rpc_sync(kCounterGet), 45);
    });
  }
}

}  // namespace
}  // namespace torchspan::worker_test
