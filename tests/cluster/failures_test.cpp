// The errors that users meet first, across real processes: each names the worker, the cause and the remedy,
// in time.
#include <cstdlib>
#include <filesystem>
#include <poll.h>

#include <ATen/ATen.h>

#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/errors.h"

namespace torchspan::failures_test {
namespace {

using testing::expect_all_end_well;
using ::testing::HasSubstr;
using testing::Process;
using testing::ProcessWorld;
using testing::require;
using torchspan::testing::error_of;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
void fail(const std::string& text) { throw std::out_of_range(text); }
Future<std::int64_t> never(Worker& worker) {
  // Never completed: its promise lives as long as the process.
  auto* promise = new Promise<std::int64_t>(worker.backend()->continuations());
  return promise->future();
}
void die() { ::kill(getpid(), SIGKILL); }
void end_thread() { ::pthread_exit(nullptr); }
Task<void> end_thread_in_coroutine() {
  ::pthread_exit(nullptr);
  co_return;
}
/// The child outlives this process by some seconds, with copies of everything that fork() copies.
void fork_child() {
  const pid_t parent = getpid();
  if (fork() != 0) return;
  while (getppid() == parent) poll(nullptr, 0, 10);
  poll(nullptr, 0, 5000);
  _exit(0);
}

constexpr Function<add> kAdd{"add"};
constexpr Function<fail> kFail{"fail"};
constexpr Function<never> kNever{"never"};
constexpr Function<die> kDie{"die"};
constexpr Function<end_thread> kEndThread{"end_thread"};
constexpr Function<end_thread_in_coroutine> kEndThreadInCoroutine{"end_thread_in_coroutine"};
constexpr Function<fork_child> kForkChild{"fork_child"};
constexpr Function<add> kUnlisted{"unlisted"};

FunctionTable functions() {
  return FunctionTable().add(kAdd, kFail, kNever, kDie, kForkChild, kEndThread, kEndThreadInCoroutine);
}

void calls_work() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  for (int rank = 0; rank < worker.world_size(); ++rank) {
    require(worker.rpc_sync(rank, kAdd, 40, 2) == 42, "40 + 2 = 42");
  }
  const at::Tensor big = at::arange(1 << 20);
  auto echoed = worker.rpc_sync((worker.rank() + 1) % worker.world_size(), "aten::mul", {big, 2});
  require(at::equal(echoed.toTensor(), big * 2), "a tensor of 8 MiB comes back doubled");
  session.shutdown();
}

void remote_exception() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 0) {
    const Error error = error_of([&] { session.worker().rpc_sync("worker1", kFail, "index 7 of 3"); });
    require(error.kind() == ErrorKind::kRemoteFailure, error.what());
    require(error.frames().at(0).type == "std::out_of_range", error.what());
    require(error.frames().at(0).text == "index 7 of 3", error.what());
    require(error.worker() == "worker1" && error.call() == "fail", error.what());
    require(std::string(error.what()).find("failures_test.cpp:") != std::string::npos, error.what());
  }
  session.shutdown();
}

/// More threads end than the worker may have at a time.
void handlers_end_their_threads() {
  WorkerOptions options = WorkerOptions::from_env();
  options.max_threads = 8;
  Session session(options, functions());
  Worker& worker = session.worker();
  for (int call = 0; session.rank() == 0 && call < 30; ++call) {
    const Error error =
        error_of([&] { worker.with({.timeout = std::chrono::seconds(20)}).rpc_sync("worker1", kEndThread); });
    require(error.kind() == ErrorKind::kRemoteFailure, error.what());
    require(std::string(error.what()).find("'end_thread' ended its thread") != std::string::npos,
            error.what());
    require(worker.rpc_sync("worker1", kAdd, call, 2) == call + 2, "the worker serves");
    const auto next =
        worker.rpc_async("worker1", kAdd, 1, 2).then([](Future<std::int64_t>) { ::pthread_exit(nullptr); });
    const Error callback = error_of([&] { next.wait(std::chrono::seconds(20)); });
    require(std::string(callback.what()).find("a callback of a future ended its thread") != std::string::npos,
            callback.what());
  }
  session.shutdown();
}

void coroutine_ends_its_thread() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 0) {
    const Error error = error_of([&] { session.worker().rpc_sync("worker1", kEndThreadInCoroutine); });
    require(error.kind() == ErrorKind::kDisconnected, error.what());
    session.abort(std::make_exception_ptr(error));
  } else {
    session.shutdown();
  }
}

void unknown_function() {
  Session session(WorkerOptions::from_env(), functions());
  const Error error = error_of([&] { session.worker().rpc_sync("worker1", kUnlisted, 1, 2); });
  require(error.kind() == ErrorKind::kInvalid, error.what());
  require(error.message().find("'unlisted'") != std::string::npos, error.what());
  session.shutdown();
}

void worker_dies_during_a_call() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  const char* leaves_child = std::getenv("TORCHSPAN_TEST_CHILD");
  if (session.rank() != 0) {
    session.runtime().executor.sleep(std::chrono::seconds(30));
    return;
  }
  if (leaves_child != nullptr) worker.rpc_sync("worker1", kForkChild);
  auto stuck = worker.rpc_async("worker1", kNever);
  require(worker.rpc_sync("worker1", kAdd, 1, 1) == 2, "worker1 lives");
  const TimePoint before = session.runtime().executor.now();
  auto killing = worker.rpc_async("worker1", kDie);
  for (auto* call : {&stuck}) {
    const Error error = error_of([&] { call->wait(); });
    require(error.kind() == ErrorKind::kDisconnected, error.what());
    require(error.worker() == "worker1", error.what());
  }
  const Error last = error_of([&] { killing.wait(); });
  require(last.kind() == ErrorKind::kDisconnected, last.what());
  require(session.runtime().executor.now() - before < std::chrono::seconds(4),
          "at once, not after a silence of 5 s");
  require(worker.rpc_sync("worker2", kAdd, 1, 1) == 2, "worker2 is not concerned");
  const Error shutdown = error_of([&] { session.shutdown(std::chrono::seconds(20)); });
  require(std::string(shutdown.what()).find("worker1") != std::string::npos, shutdown.what());
}

void join_only() {
  auto options = WorkerOptions::from_env();
  options.environment.join_timeout = std::chrono::seconds(5);
  Session session(options, functions());
  session.shutdown();
}

/// An exception ends rank 0's session. Its process takes a moment to end, like a program that frees a lot of
/// memory.
void ends_early() {
  try {
    Session session(WorkerOptions::from_env(), functions());
    if (session.rank() == 0) throw std::out_of_range("rank 0 ends early");
    session.shutdown();
    return;
  } catch (const std::out_of_range&) {
  }
  poll(nullptr, 0, 3000);
  std::exit(std::atoi(std::getenv("TORCHSPAN_TEST_CODE")));
}

/// Returns the exit code and output of `torchspan run` for a scenario; in ends_early(), rank 0 ends with `code`.
std::pair<int, std::string> launch(const std::string& scenario, const std::string& code = "1") {
  const testing::TemporaryFolder folder;
  const auto executor = make_executor();
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  Process launcher(
      {self.parent_path() / "torchspan", "run", "-n", "3", self},
      {{"TORCHSPAN_TEST_SCENARIO", scenario}, {"TORCHSPAN_TEST_CODE", code}, {"OMP_NUM_THREADS", "1"}},
      folder.path() + "/output");
  EXPECT_TRUE(launcher.wait(*executor, std::chrono::seconds(60)));
  return {launcher.exit_code(), launcher.output()};
}

TEST(Cluster, ReplacesThreadsThatHandlersAndCallbacksEnd) {
  ProcessWorld world(2);
  world.start_all("failures.handlers_end_their_threads");
  expect_all_end_well(world);
  EXPECT_THAT(world.process(1).output(), HasSubstr("function 'end_thread' ended its thread"));
}

TEST(Cluster, SaysWhyItEndsWhenACoroutineEndsItsThread) {
  ProcessWorld world(2);
  world.start_all("failures.coroutine_ends_its_thread");
  EXPECT_TRUE(world.process(1).wait(world.executor(), std::chrono::seconds(30)));
  EXPECT_EQ(world.process(1).exit_code(), 128 + SIGABRT);
  EXPECT_THAT(world.process(1).output(), HasSubstr("a coroutine ended its thread"));
  EXPECT_TRUE(world.process(0).wait(world.executor(), std::chrono::seconds(30)));
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
}

TEST(Cluster, LauncherReportsTheCodeOfAWorkerThatEndedItsSessionEarly) {
  const auto [code, output] = launch("failures.ends_early", "7");
  EXPECT_EQ(code, 7) << output;
  EXPECT_THAT(output,
              ::testing::ContainsRegex("first failure: worker0 .rank 0, pid [0-9]+. exited with code 7"));
  EXPECT_THAT(output, HasSubstr("worker1, worker2: failed because of it (exited with code 1)"));
}

TEST(Cluster, LauncherReportsAWorkerThatEndedWithoutShutdown) {
  const auto [code, output] = launch("failures.ends_early", "0");
  EXPECT_EQ(code, 1) << output;
  EXPECT_THAT(output,
              ::testing::ContainsRegex(
                  "first failure: worker0 .rank 0, pid [0-9]+. exited with code 0 without shutdown.., "));
}

TEST(Cluster, LauncherShowsTheErrorThatEndedASession) {
  const auto [code, output] = launch("failures.throws_in_its_body");
  EXPECT_EQ(code, 1) << output;
  EXPECT_THAT(output,
              ::testing::ContainsRegex("first failure: worker1 .rank 1, pid [0-9]+. exited with code 1"));
  EXPECT_THAT(output, HasSubstr("  its error: std::out_of_range: the data of rank 1 has ended\n"));
}

/// Rank 1's session ends first; the others still call it.
void leaves_by_scope() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 1) return;
  session.runtime().executor.sleep(std::chrono::milliseconds(300));
  require(session.worker().rpc_sync("worker1", kAdd, 1, 1) == 2, "worker1 serves until all are done");
}

void throws_in_its_body() {
  Session session(WorkerOptions::from_env(), functions());
  session.run([](Session& self) {
    if (self.rank() == 1) throw std::out_of_range("the data of rank 1 has ended");
    self.worker().rpc_sync("worker1", kNever);
  });
}

/// Rank 1 reaches shutdown() late: waiting for it has no limit, and a call that never ends has one.
void has_a_limit_for_shutdown() {
  WorkerOptions options = WorkerOptions::from_env();
  options.shutdown_timeout = std::chrono::milliseconds(500);
  Session session(options, functions());
  std::optional<Future<std::int64_t>> stuck;
  const Caller patient = session.worker().with({.timeout = Duration::zero()});
  if (session.rank() == 0) stuck = patient.rpc_async("worker1", kNever);
  if (session.rank() == 1) session.runtime().executor.sleep(std::chrono::seconds(2));
  const TimePoint begin = session.runtime().executor.now();
  const Error error = error_of([&] { session.shutdown(); });
  require(error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected, error.what());
  require(session.rank() != 0 || session.runtime().executor.now() - begin >= std::chrono::seconds(1),
          "rank 1 is waited for");
}

TEST(Cluster, ASessionThatEndsWithItsScopeServesTheOthersUntilTheyAreDone) {
  ProcessWorld world(3);
  world.start_all("failures.leaves_by_scope");
  expect_all_end_well(world);
}

TEST(Cluster, AnExceptionOfTheBodyReachesTheOtherWorkers) {
  ProcessWorld world(3);
  world.start_all("failures.throws_in_its_body");
  for (const std::size_t rank : {0, 2}) {
    EXPECT_TRUE(world.process(rank).wait(world.executor(), std::chrono::seconds(60)));
    EXPECT_EQ(world.process(rank).exit_code(), 1);
    EXPECT_THAT(
        world.process(rank).output(),
        HasSubstr("left because its program failed: std::out_of_range: the data of rank 1 has ended"));
  }
}

TEST(Cluster, ShutdownEndsAtItsDefaultLimit) {
  ProcessWorld world(2);
  world.start_all("failures.has_a_limit_for_shutdown");
  expect_all_end_well(world);
}

TEST(Cluster, CallsAcrossProcesses) {
  ProcessWorld world(3);
  world.start_all("failures.calls_work");
  expect_all_end_well(world);
}

TEST(Cluster, ReportsARemoteExceptionWithItsTypeTextWorkerAndPlace) {
  ProcessWorld world(2);
  world.start_all("failures.remote_exception");
  expect_all_end_well(world);
}

TEST(Cluster, RefusesAnUnknownFunction) {
  ProcessWorld world(2);
  world.start_all("failures.unknown_function");
  expect_all_end_well(world);
}

TEST(Cluster, FailsACallSoonAfterItsWorkerIsKilled) {
  ProcessWorld world(3);
  world.start_all("failures.worker_dies_during_a_call");
  ASSERT_TRUE(world.process(0).wait(world.executor(), std::chrono::seconds(60)));
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
}

TEST(Cluster, FailsACallSoonThoughAForkedChildOfTheKilledWorkerLives) {
  ProcessWorld world(3);
  for (int rank = 0; rank < 3; ++rank) {
    world.start(rank, "failures.worker_dies_during_a_call", {{"TORCHSPAN_TEST_CHILD", "1"}});
  }
  ASSERT_TRUE(world.process(0).wait(world.executor(), std::chrono::seconds(60)));
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
}

TEST(Cluster, NamesTheWorkerThatNeverConnected) {
  ProcessWorld world(3);
  Process& first = world.start(0, "failures.join_only");
  Process& second = world.start(1, "failures.join_only");
  for (Process* process : {&first, &second}) {
    ASSERT_TRUE(process->wait(world.executor(), std::chrono::seconds(30)));
    EXPECT_EQ(process->exit_code(), 1);
    EXPECT_THAT(process->output(), HasSubstr("timed out"));
    EXPECT_THAT(process->output(), HasSubstr("rank 2"));
  }
}

TEST(Cluster, RefusesTwoWorkersWithOneNameOnBoth) {
  ProcessWorld world(2);
  Process& first = world.start(0, "failures.join_only", {{"TORCHSPAN_NAME", "twin"}});
  Process& second = world.start(1, "failures.join_only", {{"TORCHSPAN_NAME", "twin"}});
  for (Process* process : {&first, &second}) {
    ASSERT_TRUE(process->wait(world.executor(), std::chrono::seconds(30)));
    EXPECT_EQ(process->exit_code(), 1);
    EXPECT_THAT(process->output(), HasSubstr("twin"));
  }
}

TEST(Cluster, RefusesWorldSizesThatDoNotMatch) {
  ProcessWorld world(2);
  Process& first = world.start(0, "failures.join_only");
  Process& second = world.start(1, "failures.join_only", {{"WORLD_SIZE", "3"}});
  for (Process* process : {&first, &second}) {
    ASSERT_TRUE(process->wait(world.executor(), std::chrono::seconds(30)));
    EXPECT_EQ(process->exit_code(), 1);
    EXPECT_THAT(process->output(), HasSubstr("3"));
  }
}

TEST(Cluster, RefusesARankOutsideItsWorld) {
  ProcessWorld world(2);
  Process& process = world.start(5, "failures.join_only");
  ASSERT_TRUE(process.wait(world.executor(), std::chrono::seconds(30)));
  EXPECT_EQ(process.exit_code(), 1);
  EXPECT_THAT(process.output(), HasSubstr("RANK"));
}

TEST(Cluster, ReportsThatThePortIsInUse) {
  ProcessWorld world(2);
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(world.port()));
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  Process& process = world.start(0, "failures.join_only");
  ASSERT_TRUE(process.wait(world.executor(), std::chrono::seconds(30)));
  EXPECT_EQ(process.exit_code(), 1);
  EXPECT_THAT(process.output(), HasSubstr(std::to_string(world.port())));
  EXPECT_THAT(process.output(), HasSubstr("in use"));
  close(taken);
}

const testing::Scenarios kScenarios("failures", {{"calls_work", calls_work},
                                                 {"remote_exception", remote_exception},
                                                 {"unknown_function", unknown_function},
                                                 {"handlers_end_their_threads", handlers_end_their_threads},
                                                 {"coroutine_ends_its_thread", coroutine_ends_its_thread},
                                                 {"worker_dies_during_a_call", worker_dies_during_a_call},
                                                 {"join_only", join_only},
                                                 {"ends_early", ends_early},
                                                 {"leaves_by_scope", leaves_by_scope},
                                                 {"throws_in_its_body", throws_in_its_body},
                                                 {"has_a_limit_for_shutdown", has_a_limit_for_shutdown}});

}  // namespace
}  // namespace torchspan::failures_test
