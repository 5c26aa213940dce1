// Shutting down: with all calls completed, at once, late, and when a step fails.
#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_shutdown {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

struct Tally {
  int done = 0;
};
std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
void work(Worker& worker, Duration time) {
  nap(worker, time);
  ++state_of<Tally>(worker).done;
}
void fire_and_forget(Worker& worker, std::int64_t hops);

constexpr Function<add> kAdd{"add"};
constexpr Function<work> kWork{"work"};
constexpr Function<fire_and_forget> kFireAndForget{"fire_and_forget"};

void fire_and_forget(Worker& worker, std::int64_t hops) {
  ++state_of<Tally>(worker).done;
  if (hops > 1)
    static_cast<void>(worker.rpc_async((worker.rank() + 1) % worker.world_size(), kFireAndForget, hops - 1));
}

ClusterOptions world(Tally& tally, int workers) {
  return with_state(world_of(workers, FunctionTable().add(kAdd, kWork, kFireAndForget)), tally);
}

/// Runs `body` with every service under seeds 1 to 3, then `check` with what each rank threw.
void on_services(int workers, const std::function<void(rpc::WorkerService&, Tally&)>& body,
                 const std::function<void(const std::vector<std::exception_ptr>&, const Tally&)>& check,
                 const std::function<void(ClusterOptions&)>& change = {}) {
  for (std::uint64_t seed = 1; seed <= 3 && !::testing::Test::HasFailure(); ++seed) {
    Tally tally;
    ClusterOptions options = world(tally, workers);
    options.seed = seed;
    if (change) change(options);
    SimCluster cluster(options);
    check(cluster.try_services([&](rpc::WorkerService& service) { body(service, tally); }), tally);
    if (::testing::Test::HasFailure()) ADD_FAILURE() << "seed " << seed;
  }
}

void expect_no_failure(const std::vector<std::exception_ptr>& failures) {
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

// peer: rpc_test.py local_shutdown: same
TEST(RpcConformance, LocalShutdown) {
  on_services(
      3, [](rpc::WorkerService& service, Tally&) { service.stop(); },
      [](const auto& failures, const Tally&) { expect_no_failure(failures); });
}

// peer: rpc_test.py local_shutdown_with_rpc: same
TEST(RpcConformance, LocalShutdownWithRpc) {
  on_services(
      3,
      [](rpc::WorkerService& service, Tally&) {
        Worker& worker = service.worker();
        EXPECT_EQ(worker.rpc_sync((worker.rank() + 1) % 3, kAdd, 1, 2), 3);
        worker.barrier();
        service.stop();
        service.stop();
      },
      [](const auto& failures, const Tally&) { expect_no_failure(failures); });
}

// peer: rpc_test.py (documented) local shutdown fails pending calls: same
TEST(RpcConformance, LocalShutdownFailsPendingCalls) {
  on_services(
      2,
      [](rpc::WorkerService& service, Tally&) {
        Worker& worker = service.worker();
        if (worker.rank() == 1) return nap(worker, seconds(10));
        auto pending = worker.rpc_async("worker1", kWork, seconds(5));
        nap(worker, seconds(1));
        service.stop();
        expect_error(ErrorKind::kCancelled, "worker1", [&] { pending.wait(); });
      },
      [](const auto& failures, const Tally&) { expect_no_failure(failures); });
}

// peer: rpc_test.py shutdown_followed_by_rpc: same
TEST(RpcConformance, ShutdownFollowedByRpc) {
  on_services(
      2,
      [](rpc::WorkerService& service, Tally&) {
        Worker& worker = service.worker();
        EXPECT_EQ(worker.rpc_sync(1 - worker.rank(), kAdd, 1, 2), 3);
        service.shutdown();
        const std::string text = "shut down";
        expect_error(ErrorKind::kCancelled, text, [&] { worker.rpc_sync(1 - worker.rank(), kAdd, 1, 2); });
        expect_error(ErrorKind::kCancelled, text, [&] { worker.rpc_async(0, kAdd, 1, 2).wait(); });
        expect_error(ErrorKind::kCancelled, text, [&] { worker.remote(1, kAdd, 1, 2).creation().wait(); });
        expect_error(ErrorKind::kCancelled, "", [&] { worker.barrier(); });
      },
      [](const auto& failures, const Tally&) { expect_no_failure(failures); });
}

// peer: rpc_test.py graceful_shutdown_with_uneven_workload: same
TEST(RpcConformance, GracefulShutdownWithUnevenWorkload) {
  on_services(
      4,
      [](rpc::WorkerService& service, Tally&) {
        Worker& worker = service.worker();
        if (worker.rank() == 0) {
          for (std::uint32_t to = 1; to < 4; ++to) {
            for (int i = 0; i < 5; ++i) static_cast<void>(worker.rpc_async(to, kWork, seconds(to)));
          }
        }
        service.shutdown();
      },
      [](const auto& failures, const Tally& tally) {
        expect_no_failure(failures);
        EXPECT_EQ(tally.done, 15);
      });
}

// peer: rpc_test.py multi_layer_nested_async_rpc: same
TEST(RpcConformance, MultiLayerNestedAsyncRpc) {
  on_services(
      4,
      [](rpc::WorkerService& service, Tally&) {
        Worker& worker = service.worker();
        static_cast<void>(worker.rpc_async((worker.rank() + 1) % 4, kFireAndForget, 20));
        service.shutdown();
      },
      [](const auto& failures, const Tally& tally) {
        expect_no_failure(failures);
        EXPECT_EQ(tally.done, 4 * 20);
      });
}

// peer: rpc_test.py wait_all_workers_timeout: better: the error names the missing workers
TEST(RpcConformance, WaitAllWorkersTimeout) {
  on_services(
      3,
      [](rpc::WorkerService& service, Tally& tally) {
        Worker& worker = service.worker();
        Executor& executor = worker.runtime().executor;
        if (worker.rank() != 0) {
          nap(worker, seconds(2));
        }
        const TimePoint begin = executor.now();
        const Error error = error_of([&] { service.shutdown(executor.deadline_in(milliseconds(10))); });
        EXPECT_LT(executor.now() - begin, seconds(2));
        ++tally.done;
        if (worker.rank() != 0) return;
        EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
        EXPECT_THAT(error.what(), AllOf(HasSubstr("'worker0' stopped without waiting"), HasSubstr("worker1"),
                                        HasSubstr("worker2")));
      },
      [](const auto& failures, const Tally& tally) {
        expect_no_failure(failures);
        EXPECT_EQ(tally.done, 3);
      });
}

void dense_calls(Worker& worker) {
  std::vector<Future<std::int64_t>> calls;
  for (std::uint32_t to = 0; to < 4; ++to) {
    for (int i = 0; i < 20; ++i) calls.push_back(worker.rpc_async(to, kAdd, i, to));
  }
  for (int i = 0; i < 80; ++i) EXPECT_EQ(calls[i].wait(), i % 20 + i / 20);
}

// peer: rpc_test.py wait_all_workers_dense: same
TEST(RpcConformance, WaitAllWorkersDense) {
  on_services(
      4,
      [](rpc::WorkerService& service, Tally&) {
        dense_calls(service.worker());
        service.shutdown();
      },
      [](const auto& failures, const Tally&) { expect_no_failure(failures); });
}

// peer: rpc_test.py wait_all_workers_twice_dense: same
TEST(RpcConformance, WaitAllWorkersTwiceDense) {
  on_services(
      4,
      [](rpc::WorkerService& service, Tally&) {
        dense_calls(service.worker());
        service.worker().barrier();
        dense_calls(service.worker());
        service.worker().barrier();
        service.shutdown();
        service.shutdown();
      },
      [](const auto& failures, const Tally&) { expect_no_failure(failures); });
}

/// Its shutdown fails on worker1.
class FailsToShutDown final : public rpc::Extension {
 public:
  void attach(rpc::Registrar& registrar) override {
    Worker& worker = registrar.worker();
    registrar.on_shutdown([&worker] {
      if (worker.rank() != 1) return make_ready_future<void>();
      return make_failed_future<void>(std::make_exception_ptr(std::runtime_error("cannot flush")));
    });
  }
};

// peer: rpc_test.py shutdown_errors: better: the others are notified immediately that the failing worker left
TEST(RpcConformance, ShutdownErrors) {
  on_services(
      3,
      [](rpc::WorkerService& service, Tally&) {
        Executor& executor = service.worker().runtime().executor;
        service.shutdown(executor.deadline_in(seconds(10)));
      },
      [](const auto& failures, const Tally&) {
        for (const int rank : {0, 1, 2}) {
          ASSERT_TRUE(failures[rank]) << rank;
          const Error error = to_error(failures[rank]);
          EXPECT_THAT(error.what(), HasSubstr(rank == 1 ? "cannot flush" : "worker1"));
          EXPECT_THAT(error.what(), HasSubstr("'" + SimCluster::name(rank) + "' stopped without waiting"));
        }
      },
      [](ClusterOptions& options) {
        options.extensions = [] {
          std::vector<std::unique_ptr<rpc::Extension>> extensions;
          extensions.push_back(std::make_unique<FailsToShutDown>());
          return extensions;
        };
      });
}

}  // namespace
}  // namespace torchspan::rpc_shutdown
