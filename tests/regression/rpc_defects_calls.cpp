// Regressions: calls that started, ended or were reported in the wrong way.
#include "tests/regression/rpc_defects.h"

namespace torchspan::rpc_defects_calls {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)

TEST(RpcDefects, CancelledCallToItselfDoesNotBegin) {
  Marks marks;
  ClusterOptions options = world(marks, 1);
  options.threads = 1;
  first(options, [&](Worker& worker, SimCluster&) {
    auto busy = worker.rpc_async(0, kSleepMs, 500);
    nap(worker, milliseconds(10));
    std::stop_source source;
    auto call = worker.with({.stop = source.get_token()}).rpc_async(0, kMark);
    nap(worker, milliseconds(100));
    source.request_stop();
    EXPECT_THROW(call.wait(), Error);
    busy.wait();
    nap(worker, seconds(1));
    EXPECT_EQ(marks.begun, 0);
  });
}

TEST(RpcDefects, ExpiredCallToItselfDoesNotBegin) {
  Marks marks;
  ClusterOptions options = world(marks, 1);
  options.threads = 1;
  first(options, [&](Worker& worker, SimCluster&) {
    auto busy = worker.rpc_async(0, kSleepMs, 500);
    nap(worker, milliseconds(10));
    auto call = worker.with({.timeout = milliseconds(100)}).rpc_async(0, kMark);
    EXPECT_THROW(call.wait(), Error);
    busy.wait();
    nap(worker, seconds(1));
    EXPECT_EQ(marks.begun, 0);
  });
}

TEST(RpcDefects, NestedCallWithATokenOfItsOwnEndsWithTheCallItServes) {
  Marks marks;
  first(world(marks, 3), [&](Worker& worker, SimCluster&) {
    std::stop_source source;
    auto call = worker.with({.stop = source.get_token()}).rpc_async(1, kDelegate);
    nap(worker, milliseconds(100));
    EXPECT_EQ(marks.begun, 1);
    source.request_stop();
    EXPECT_THROW(call.wait(), Error);
    nap(worker, seconds(2));
    EXPECT_EQ(marks.stopped, 1);
  });
}

TEST(RpcDefects, HandlersOfASilentCallerAreStopped) {
  Marks marks;
  ClusterOptions options = world(marks, 3);
  options.graceful = false;
  options.adjust = [](int rank, WorkerPlan& plan) { plan.join.host_id = "host" + std::to_string(rank); };
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 2) {
      try {
        worker.with({.timeout = Duration::zero()}).rpc_sync(1, kWork);
      } catch (const std::exception&) {
      }
      return;
    }
    if (worker.rank() == 0) {
      nap(worker, milliseconds(100));
      for (const char* a : {"worker2", "worker2.membership"})
        for (const char* b : {"worker0", "worker1", "store", "worker0.membership", "worker1.membership"})
          cluster.network().cut(a, b);
    }
    nap(worker, seconds(120));
    if (worker.rank() == 1) {
      EXPECT_FALSE(worker.backend()->is_present(2));
      EXPECT_EQ(marks.begun, 1);
      EXPECT_EQ(marks.stopped, 1);
    }
    cluster.network().heal("worker2", "worker1");
    for (const char* a : {"worker2", "worker2.membership"})
      for (const char* b : {"worker0", "worker1", "store", "worker0.membership", "worker1.membership"})
        cluster.network().heal(a, b);
    nap(worker, seconds(30));
  });
}

/// A member that the world has declared dead continues after a cut: its old connections still work.
TEST(RpcDefects, CallsOfAWorkerDeclaredDeadAreRefused) {
  Marks marks;
  ClusterOptions options = world(marks, 3);
  options.graceful = false;
  options.adjust = [](int rank, WorkerPlan& plan) { plan.join.host_id = "host" + std::to_string(rank); };
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 2) {
      worker.rpc_sync(1, kSleepMs, 1);
      nap(worker, seconds(1));
      try {
        static_cast<void>(worker.with({.timeout = seconds(30)}).rpc_async(1, kMark));  // during the cut
        nap(worker, seconds(40));
      } catch (const std::exception&) {
      }
      return nap(worker, seconds(80));
    }
    nap(worker, milliseconds(500));
    const char* mine[] = {"worker2", "worker2.membership"};
    const char* others[] = {"worker0", "worker1", "store", "worker0.membership", "worker1.membership"};
    if (worker.rank() == 0) {
      for (const char* a : mine)
        for (const char* b : others) cluster.network().cut(a, b);
    }
    nap(worker, seconds(20));
    if (worker.rank() == 1) {
      EXPECT_FALSE(worker.backend()->is_present(2));
      EXPECT_EQ(marks.begun, 0);
      cluster.network().heal("worker2", "worker1");
      nap(worker, seconds(10));
      EXPECT_EQ(marks.begun, 0) << "it served a worker that is dead to its world";
    }
    nap(worker, seconds(60));
  });
}

TEST(RpcDefects, WaitScopeFailsForAResultThatCannotBeDecoded) {
  Marks marks;
  first(world(marks, 2), [](Worker& worker, SimCluster&) {
    WaitScope calls(worker);
    auto call = calls.rpc_async(1, kUnreadable);
    EXPECT_THROW(calls.wait(), Error);
    EXPECT_THROW(call.wait(), Error);
  });
}

TEST(RpcDefects, WhenAllTakesAFutureThatIsReadyFirst) {
  Marks marks;
  first(world(marks, 2), [](Worker& worker, SimCluster&) {
    std::vector<Future<void>> futures{make_ready_future<void>(), worker.rpc_async(1, kSleepMs, 100)};
    wait_all(futures);
    EXPECT_TRUE(futures[1].done());
  });
}

TEST(RpcDefects, ShutdownWaitsForContinuations) {
  Marks marks;
  SimCluster cluster(world(marks, 2));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    worker.rpc_async(1, kSleepMs, 10).add_done_callback([worker](Future<void> done) mutable {
      done.wait();
      nap(worker, milliseconds(500));
      worker.rpc_sync(1, kMark);
    });
  });
  EXPECT_EQ(marks.begun, 1);
}
class SlowInterceptor final : public rpc::Extension, public rpc::Interceptor {
 public:
  void attach(rpc::Registrar& registrar) override {
    runtime_ = &registrar.runtime();
    registrar.intercept(*this);
  }
  std::string_view name() const override { return "slow"; }
  Bytes outgoing(const rpc::CallInfo& call, std::span<at::Tensor>) override {
    if (!call.reply) runtime_->executor.sleep(milliseconds(100));
    return {};
  }
  void undo(const rpc::CallInfo&, BytesView) override {}
  rpc::EnvironmentValuePtr incoming(const rpc::CallInfo&, std::span<at::Tensor>, BytesView) override {
    return nullptr;
  }

 private:
  Runtime* runtime_ = nullptr;
};
TEST(RpcDefects, CallThatIsBeingMadeWhileTheWorkerStopsEnds) {
  Marks marks;
  ClusterOptions options = world(marks, 2);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> all;
    all.push_back(std::make_unique<SlowInterceptor>());
    return all;
  };
  SimCluster cluster(options);
  bool ended = false;
  cluster.try_services([&](rpc::WorkerService& service) {
    Worker worker = service.worker();
    if (worker.rank() == 1) {
      nap(worker, seconds(30));
      return;
    }
    auto thread = worker.runtime().executor.spawn("caller", [&] {
      try {
        worker.rpc_async(1, kSleepMs, 10).wait(seconds(10));
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
      }
      ended = true;
    });
    nap(worker, milliseconds(50));
    service.stop();
    nap(worker, seconds(20));
    thread.join();
  });
  EXPECT_TRUE(ended);
}
class CountingDepartures final : public rpc::Extension {
 public:
  explicit CountingDepartures(std::vector<std::uint32_t>& heard) : heard_(heard) {}
  void attach(rpc::Registrar& registrar) override {
    if (registrar.worker().rank() != 0) return;
    registrar.on_departure([this](std::uint32_t rank, const Error&) { heard_.push_back(rank); });
  }

 private:
  std::vector<std::uint32_t>& heard_;
};
TEST(RpcDefects, DepartureIsReportedOnce) {
  Marks marks;
  std::vector<std::uint32_t> heard;
  ClusterOptions options = world(marks, 3);
  options.graceful = false;
  options.extensions = [&] {
    std::vector<std::unique_ptr<rpc::Extension>> all;
    all.push_back(std::make_unique<CountingDepartures>(heard));
    return all;
  };
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, seconds(20));
    nap(worker, seconds(1));
    cluster.kill(1);
    nap(worker, seconds(1));
  });
  EXPECT_EQ(std::count(heard.begin(), heard.end(), 1u), 1);
}
class SlowDepartures final : public rpc::Extension {
 public:
  void attach(rpc::Registrar& registrar) override {
    Runtime& runtime = registrar.runtime();
    registrar.on_departure(
        [&runtime](std::uint32_t, const Error&) { runtime.executor.sleep(milliseconds(100)); });
  }
};
TEST(RpcDefects, DepartureWhileTheServiceEndsIsHarmless) {
  Marks marks;
  ClusterOptions options = world(marks, 3);
  options.graceful = false;
  options.open = true;
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> all;
    all.push_back(std::make_unique<SlowDepartures>());
    return all;
  };
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    nap(worker, seconds(1));
    if (worker.rank() == 2) return;  // stop() takes 200 ms here
    if (worker.rank() == 1) return nap(worker, seconds(20));
    nap(worker, milliseconds(150));
    cluster.kill(1);
    nap(worker, seconds(5));
  });
}
struct Order {
  std::vector<std::string> callers;
};
void sign(Worker& worker) { state_of<Order>(worker).callers.push_back(worker.current_call()->caller.name); }
/// Peers that call before the news that they joined has arrived are served in an order that the seed
/// determines.
TEST(RpcDefects, EarlyCallersAreServedInTheSameOrderUnderOneSeed) {
  constexpr Function<sign> kSign{"sign"};
  std::vector<std::string> orders;
  std::vector<std::unique_ptr<char[]>> litter;
  for (int round = 0; round < 12; ++round) {
    Order order;
    ClusterOptions options = with_state(world_of(1, FunctionTable().add(kSign)), order);
    options.open = true;
    options.threads = 1;
    options.graceful = false;
    SimCluster cluster(options);
    cluster.run([&](Worker& worker) {
      cluster.network().block([](const net::SimMessage& message) {
        return message.from == "sim:store" && message.to == "sim:worker0.membership";
      });
      std::vector<Thread> others;
      for (int rank = 1; rank <= 8; ++rank) {
        others.push_back(cluster.start(rank, 0, [&](rpc::WorkerService& service) {
          service.worker().rpc_sync(0, kSign);
          service.worker().runtime().executor.sleep(seconds(10));
        }));
      }
      nap(worker, seconds(2));
      EXPECT_TRUE(order.callers.empty());
      cluster.network().unblock();
      for (Thread& other : others) other.join();
    });
    std::string line;
    for (const auto& caller : order.callers) line += caller.substr(6);
    orders.push_back(line);
    for (int i = 0; i < 50 * round; ++i) litter.push_back(std::make_unique<char[]>(64 + 48 * (i % 7)));
  }
  for (const auto& one : orders) EXPECT_EQ(one, orders.front());
}

TEST(RpcDefects, BusyWorkerMayLeaveAnOpenWorld) {
  Marks marks;
  ClusterOptions options = world(marks, 2);
  options.open = true;
  options.graceful = false;
  bool gone = false;
  SimCluster cluster(options);
  const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
    Worker worker = service.worker();
    if (worker.rank() == 1) {
      nap(worker, milliseconds(200));
      service.shutdown(cluster.executor().deadline_in(seconds(20)));
      gone = true;
      return;
    }
    nap(worker, milliseconds(100));
    std::vector<Thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.push_back(worker.runtime().executor.spawn("caller", [&, i] {
        nap(worker, milliseconds(3 * i));
        try {
          for (int k = 0; k < 4000 && !gone; ++k) worker.rpc_sync(1, kSleepMs, 10);
        } catch (const Error&) {
        }
      }));
    }
    for (auto& thread : threads) thread.join();
  });
  EXPECT_FALSE(failures[1]) << describe(failures[1]).text;
}

}  // namespace
}  // namespace torchspan::rpc_defects_calls
