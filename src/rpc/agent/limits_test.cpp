#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "rpc/tensor_parts/messages.h"
#include "tests/support/cluster.h"

namespace torchspan::limits_test {
namespace {

using std::chrono::milliseconds;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;

void nap(Worker& worker, std::int64_t ms) { worker.runtime().executor.sleep(milliseconds(ms)); }
void block(Worker& worker, std::int64_t ms) {
  BlockingScope blocking(worker);
  worker.runtime().executor.sleep(milliseconds(ms));
}
std::int64_t size_of(const at::Tensor& x) { return x.numel(); }
struct Cell {
  std::int64_t value = 7;
  std::int64_t get() const { return value; }
};
constexpr Function<nap> kNap{"nap"};
constexpr Function<block> kBlock{"block"};
constexpr Function<size_of> kSizeOf{"size_of"};
constexpr Class<Cell> kCell{"Cell"};
constexpr Function<&Cell::get> kGet{"Cell.get"};

void on_first(ClusterOptions options, const std::function<void(Worker&, SimCluster&)>& body) {
  options.functions.add(kNap, kBlock, kSizeOf, kCell, kGet);
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker, world);
  });
}

// peer: rpc/more queues of the caller and the callee are bounded: better
TEST(Limits, RejectACallBeyondTheLimitOfPendingCalls) {
  ClusterOptions options;
  options.service.max_pending_calls = 3;
  on_first(options, [](Worker& worker, SimCluster&) {
    std::vector<Future<void>> naps;
    for (int i = 0; i < 3; ++i) naps.push_back(worker.rpc_async(1, kNap, 100));
    try {
      worker.rpc_sync(1, kNap, 100);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_THAT(error.message(), HasSubstr("WorkerOptions::max_pending_calls"));
    }
    worker.rpc_sync(0, kNap, 1);  // another peer has its own limit
    wait_all(naps);
    worker.rpc_sync(1, kNap, 1);
  });
}

// peer: rpc/more queues of the caller and the callee are bounded
TEST(Limits, RefuseRequestsThatWouldPileUpAtTheCallee) {
  ClusterOptions options;
  options.threads = 1;
  options.service.max_waiting_bytes = 64 << 10;
  on_first(options, [](Worker& worker, SimCluster&) {
    for (const int to : {1, 0}) {
      auto busy = worker.rpc_async(to, kNap, 500);
      worker.runtime().executor.sleep(milliseconds(10));
      std::vector<Future<std::int64_t>> calls;
      const at::Tensor ten_kib = at::zeros({10 << 10}, at::kByte);
      for (int i = 0; i < 20; ++i) calls.push_back(worker.rpc_async(to, kSizeOf, ten_kib));
      int served = 0, refused = 0;
      for (auto& call : calls) {
        try {
          EXPECT_EQ(call.wait(), 10 << 10);
          ++served;
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
          EXPECT_THAT(error.message(), HasSubstr("max_waiting_bytes"));
          ++refused;
        }
      }
      EXPECT_EQ(served, 5) << "five requests of a bit more than 11 KiB fit into 64 KiB";
      EXPECT_EQ(refused, 15);
      busy.wait();
      EXPECT_EQ(worker.rpc_sync(to, kSizeOf, at::zeros({1 << 20}, at::kByte)), 1 << 20)
          << "a single request may be larger than the limit";
    }
  });
}

TEST(Limits, AreLiftedForHandlersMarkedAsBlocking) {
  ClusterOptions options;
  options.threads = 2;
  on_first(options, [](Worker& worker, SimCluster&) {
    std::vector<Future<void>> blocked;
    for (int i = 0; i < 10; ++i) blocked.push_back(worker.rpc_async(1, kBlock, 1000));
    worker.runtime().executor.sleep(milliseconds(10));
    const TimePoint before = worker.runtime().executor.now();
    EXPECT_EQ(worker.rpc_sync(1, kSizeOf, at::zeros({3})), 3);
    EXPECT_LT(worker.runtime().executor.now() - before, milliseconds(100));
    wait_all(blocked);
    auto napping = worker.rpc_async(1, kNap, 1000), too = worker.rpc_async(1, kNap, 1000);
    worker.runtime().executor.sleep(milliseconds(10));
    EXPECT_THROW(worker.with({.timeout = milliseconds(500)}).rpc_sync(1, kSizeOf, at::zeros({3})), Error)
        << "handlers that are not marked occupy both threads";
    wait_all(std::vector<Future<void>>{napping, too});
  });
}

TEST(Limits, NeverRefuseTheReferenceProtocol) {
  ClusterOptions options;
  options.service.max_pending_calls = 2;
  on_first(options, [](Worker& worker, SimCluster&) {
    for (int round = 0; round < 5; ++round) {
      auto cell = worker.remote(1, kCell);
      EXPECT_EQ(cell.rpc_sync(kGet), 7);
    }
  });
}

// peer: rpc/more a broken connection is redialed, and references outlive it: better
TEST(Reconnect, FailsPendingCallsAndReconnects) {
  on_first({}, [](Worker& worker, SimCluster& world) {
    auto cell = worker.remote(1, kCell);
    EXPECT_EQ(cell.rpc_sync(kGet), 7);
    for (int round = 0; round < 3; ++round) {
      auto call = worker.rpc_async(1, kNap, 200);
      worker.runtime().executor.sleep(milliseconds(50));
      world.network().sever("worker0", "worker1");
      try {
        call.wait();
        FAIL() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
        EXPECT_EQ(error.worker(), "worker1");
      }
      EXPECT_EQ(cell.rpc_sync(kGet), 7) << "the reference is still valid";
    }
  });
}

TEST(Reconnect, MakesTheCallOnAFreshConnectionWhenTheOldOneBrokeUnnoticed) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    on_first({.seed = seed}, [](Worker& worker, SimCluster& world) {
      worker.rpc_sync(1, kNap, 1);
      world.network().sever("worker0", "worker1");
      // Nothing was sent yet. Whether or not the end was noticed, the call succeeds or fails as disconnected.
      try {
        worker.rpc_sync(1, kNap, 1);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
      }
      worker.rpc_sync(1, kNap, 1);
    });
  }
}

// peer: rpc/more a broken connection is redialed
TEST(Reconnect, LosesNoReferenceWhoseDeletionWasInFlight) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::size_t owners = 99;
    on_first({.workers = 3, .seed = seed}, [&](Worker& worker, SimCluster& world) {
      {
        auto cell = worker.remote(1, kCell);
        EXPECT_EQ(cell.rpc_sync(kGet), 7);
      }
      world.network().sever("worker0", "worker1");
      worker.runtime().executor.sleep(std::chrono::seconds(10));
      EXPECT_EQ(worker.debug().references.pending_users, 0u);
      worker.rpc_sync(1, kNap, 1);
      owners = 0;
    });
    EXPECT_EQ(owners, 0u) << "seed " << seed;
  }
}

// A member that is wrong or hostile may send them without a limit.
TEST(Limits, MalformedMessagesAreLoggedOnceInTenSeconds) {
  ::testing::internal::CaptureStderr();
  on_first({}, [](Worker& worker, SimCluster& world) {
    const auto send_malformed = [&] {
      const Deadline until = world.executor().deadline_in(milliseconds(5000));
      EXPECT_THROW(worker.request(1, rpc::TensorPart{.tensor = 1}, until).wait(), Error);
    };
    const TimePoint begin = world.executor().now();
    for (int i = 0; i < 6; ++i) send_malformed();
    EXPECT_LT(world.executor().now() - begin, std::chrono::seconds(10));
    world.executor().sleep(std::chrono::seconds(10));
    send_malformed();
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  std::size_t lines = 0;
  for (std::size_t at = log.find("closing the connection to"); at != std::string::npos;
       at = log.find("closing the connection to", at + 1))
    ++lines;
  EXPECT_EQ(lines, 2u) << log;
  EXPECT_THAT(log, HasSubstr("(5 more of this kind since the last)"));
}

}  // namespace
}  // namespace torchspan::limits_test
