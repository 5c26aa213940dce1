// Tests what shutdown() reports: while it waits, when its deadline passes, and when a worker died.
#include <algorithm>
#include <gmock/gmock.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc::shutdown_test {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

void work(Worker& worker, Duration time) { nap(worker, time); }
constexpr Function<work> kWork{"work"};

/// What the workers of a world log while `body` runs on each.
struct Outcome {
  std::vector<std::exception_ptr> failures;
  std::string log;
  Error error(int rank) const { return to_error(failures.at(static_cast<std::size_t>(rank))); }
  /// Returns how often the log contains `text`.
  int says(const std::string& text) const {
    int times = 0;
    for (std::size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++times;
    return times;
  }
};

Outcome run_world(int workers, const std::function<void(SimCluster&, WorkerService&)>& body) {
  SimCluster cluster(world_of(workers, FunctionTable().add(kWork)));
  Outcome outcome;
  ::testing::internal::CaptureStderr();
  outcome.failures = cluster.try_services([&](WorkerService& service) { body(cluster, service); });
  outcome.log = ::testing::internal::GetCapturedStderr();
  return outcome;
}

TEST(Shutdown, NamesTheHandlerItWaitsForAfterTheCallerTimedOut) {
  const Outcome outcome = run_world(2, [](SimCluster&, WorkerService& service) {
    Worker& worker = service.worker();
    if (worker.rank() == 0) {
      expect_error(ErrorKind::kTimedOut, "work",
                   [&] { worker.with({.timeout = seconds(1)}).rpc_sync(1, kWork, Duration(seconds(45))); });
    }
    service.shutdown();
  });
  for (const auto& failure : outcome.failures) EXPECT_FALSE(failure) << describe(failure).text;
  EXPECT_THAT(outcome.log,
              HasSubstr("torchspan[worker1] warning: shutdown() has waited 10 s: this worker runs "
                        "'work' of worker 'worker0' for 10."));
  EXPECT_THAT(outcome.log, HasSubstr(" s, whose deadline passed 9."));
  EXPECT_THAT(outcome.log,
              HasSubstr("torchspan[worker0] warning: shutdown() has waited 10 s: worker 'worker1' "
                        "runs 'work' of worker 'worker0' for 1"));
  EXPECT_EQ(outcome.says("worker1] warning: shutdown() has waited"), 4) << outcome.log;
  EXPECT_EQ(outcome.says("worker0] warning: shutdown() has waited"), 4) << outcome.log;
}

TEST(Shutdown, WarnsAboutMissingWorkersAtGrowingIntervals) {
  const Outcome outcome = run_world(3, [](SimCluster&, WorkerService& service) {
    if (service.worker().rank() == 2) nap(service.worker(), seconds(100));
    service.shutdown();
  });
  for (const auto& failure : outcome.failures) EXPECT_FALSE(failure) << describe(failure).text;
  EXPECT_THAT(outcome.log,
              HasSubstr("worker0] warning: shutdown() has waited 10 s: these workers have not called "
                        "shutdown() or have unfinished work: worker2 (rank 2, pid "));
  EXPECT_EQ(outcome.says("worker0] warning: shutdown() has waited"), 4)
      << "at 10, 20, 40 and 80 s" << outcome.log;
  EXPECT_EQ(outcome.says("worker2] warning"), 0) << outcome.log;
}

TEST(Shutdown, LogsNothingWhileItServesLateWorkers) {
  const Outcome outcome = run_world(2, [](SimCluster&, WorkerService& service) {
    Worker& worker = service.worker();
    if (worker.rank() == 0) {
      for (int i = 0; i < 5; ++i) {
        worker.with({.timeout = seconds(100)}).rpc_sync(1, kWork, Duration(seconds(40)));
        nap(worker, seconds(5));
      }
    }
    service.shutdown();
  });
  EXPECT_EQ(outcome.log, "");
}

TEST(Shutdown, TheDeadlineErrorNamesUnfinishedWorkAndThisWorker) {
  const Outcome outcome = run_world(2, [](SimCluster& cluster, WorkerService& service) {
    Worker& worker = service.worker();
    const bool first = worker.rank() == 0;
    if (first)
      static_cast<void>(worker.with({.timeout = seconds(1)}).rpc_async(1, kWork, Duration(seconds(45))));
    service.shutdown(first ? cluster.executor().deadline_in(seconds(3)) : Deadline::never());
  });
  EXPECT_EQ(outcome.error(0).kind(), ErrorKind::kTimedOut);
  EXPECT_THAT(outcome.error(0).what(),
              AllOf(HasSubstr("the deadline passed without worker1 (rank 1"),
                    HasSubstr("; worker 'worker1' runs 'work' of worker 'worker0' for ")));
  EXPECT_THAT(outcome.error(1).what(),
              AllOf(HasSubstr("the deadline passed without this worker, worker1 (rank 1"),
                    HasSubstr("; this worker runs 'work' of worker 'worker0' for "),
                    HasSubstr("s, whose deadline passed ")));
  EXPECT_THAT(outcome.log,
              HasSubstr("worker1] warning: stop() has waited 10 s: this worker runs 'work' of "));
}

TEST(Shutdown, SurvivorsNameTheFirstDeathAndNotItsConsequences) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    ClusterOptions options = world_of(4, FunctionTable().add(kWork));
    options.seed = seed;
    SimCluster cluster(options);
    std::string heard;
    ::testing::internal::CaptureStderr();
    const auto failures = cluster.try_services([&](WorkerService& service) {
      Worker& worker = service.worker();
      if (worker.rank() == 1) {
        nap(worker, seconds(1));
        return cluster.kill(1);
      }
      if (worker.rank() != 0) return service.shutdown();
      const Error error = error_of([&] {
        for (int i = 0; i < 100; ++i) worker.rpc_sync(2 + i % 2, kWork, Duration(milliseconds(50)));
      });
      heard = error.what();
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(heard,
                AllOf(HasSubstr(" left because worker1 (rank 1, pid "), HasSubstr(") died: its process")))
        << "seed " << seed;
    for (const int rank : {2, 3}) {
      const auto& failure = failures[static_cast<std::size_t>(rank)];
      ASSERT_TRUE(failure);
      EXPECT_THAT(to_error(failure).what(), HasSubstr("worker1 (rank 1, pid ")) << "seed " << seed;
      EXPECT_THAT(log, Not(::testing::ContainsRegex("rank " + std::to_string(rank) + "[^)]*. died")));
    }
    if (::testing::Test::HasFailure()) break;
  }
}

TEST(Shutdown, NamesAWorkerThatLeftWithoutShutdown) {
  const Outcome outcome = run_world(3, [](SimCluster& cluster, WorkerService& service) {
    if (service.worker().rank() == 2) return nap(service.worker(), seconds(1));  // and leaves without it
    service.shutdown(cluster.executor().deadline_in(seconds(30)));
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcome.error(rank).what(),
                HasSubstr(" left without shutdown(); see its own output for why"));
    EXPECT_THAT(outcome.error(rank).what(), HasSubstr("worker2 (rank 2, pid "));
  }
}

TEST(Deaths, AreReportedToCallersBeforeConnectionEnds) {
  for (std::uint64_t seed = 1; seed <= 10 && !::testing::Test::HasFailure(); ++seed) {
    for (const bool connected : {true, false}) {
      ClusterOptions options = world_of(2, FunctionTable().add(kWork));
      options.seed = seed;
      SimCluster cluster(options);
      cluster.try_services([&](WorkerService& service) {
        Worker& worker = service.worker();
        if (worker.rank() == 1) return nap(worker, seconds(10));
        Future<void> before;
        if (connected) before = worker.rpc_async(1, kWork, Duration(seconds(5)));
        nap(worker, seconds(1));
        cluster.kill(1);
        const TimePoint killed = cluster.executor().now();
        const auto after = worker.rpc_async(1, kWork, Duration(seconds(5)));
        const std::string text = ") died: its process ended without a goodbye";
        if (connected) expect_error(ErrorKind::kDisconnected, text, [&] { before.wait(); });
        expect_error(ErrorKind::kDisconnected, text, [&] { after.wait(); });
        EXPECT_LT(cluster.executor().now() - killed, milliseconds(100)) << "as soon as it is known";
      });
    }
  }
}

TEST(Deaths, LateMessagesOfDeadWorkersAreNotErrors) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    ClusterOptions options = world_of(2, FunctionTable().add(kWork));
    options.seed = seed;
    SimCluster cluster(options);
    ::testing::internal::CaptureStderr();
    cluster.try_services([&](WorkerService& service) {
      Worker& worker = service.worker();
      if (worker.rank() == 0) return nap(worker, seconds(1));
      worker.rpc_sync(0, kWork, Duration(0));
      service.membership().give_up("left because of a test");  // its connections stay open
      for (int i = 0; i < 400; ++i) {
        static_cast<void>(worker.rpc_async(0, kWork, Duration(0)));
        nap(worker, std::chrono::microseconds(5));
      }
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, HasSubstr("torchspan[worker0] warning: worker1 (rank 1"));
    ASSERT_THAT(log, Not(HasSubstr("not a hello"))) << "seed " << seed;
  }
}

}  // namespace
}  // namespace torchspan::rpc::shutdown_test
