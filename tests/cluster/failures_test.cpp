// The errors that a user meets first, across real processes: each names who, what and what to do, in time.
#include <ATen/ATen.h>

#include <torchspan/rpc/worker.h>
#include <torchspan/session/session.h>

#include "tests/support/cluster_main.h"

namespace torchspan {
namespace {

using testing::expect_all_end_well;
using ::testing::HasSubstr;
using testing::Process;
using testing::ProcessWorld;
using testing::require;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
void fail(const std::string& text) { throw std::out_of_range(text); }
Future<std::int64_t> never(Worker& worker) {
  // Completed by nobody: its promise lives as long as the process.
  auto* promise = new Promise<std::int64_t>(worker.endpoint()->host());
  return promise->future();
}
void die() { ::kill(getpid(), SIGKILL); }

constexpr Function<add> kAdd{"add"};
constexpr Function<fail> kFail{"fail"};
constexpr Function<never> kNever{"never"};
constexpr Function<die> kDie{"die"};
constexpr Function<add> kUnlisted{"unlisted"};

FunctionTable functions() { return FunctionTable().add(kAdd, kFail, kNever, kDie); }

/// What a call throws, and how long it took.
template <class F>
Error error_of(F&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("nothing was thrown");
}

void calls_work() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  for (std::uint32_t rank = 0; rank < worker.world_size(); ++rank) {
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
  if (session.rank() != 0) {
    session.runtime().executor.sleep(std::chrono::seconds(30));
    return;
  }
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
  require(session.runtime().executor.now() - before < std::chrono::seconds(1), "within a second");
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

TEST(Cluster, CallsAcrossProcesses) {
  ProcessWorld world(3);
  world.start_all("calls_work");
  expect_all_end_well(world);
}

TEST(Cluster, ReportsARemoteExceptionWithItsTypeTextWorkerAndPlace) {
  ProcessWorld world(2);
  world.start_all("remote_exception");
  expect_all_end_well(world);
}

TEST(Cluster, RefusesAnUnknownFunction) {
  ProcessWorld world(2);
  world.start_all("unknown_function");
  expect_all_end_well(world);
}

TEST(Cluster, FailsACallWithinASecondWhenItsWorkerIsKilled) {
  ProcessWorld world(3);
  world.start_all("worker_dies_during_a_call");
  ASSERT_TRUE(world.process(0).wait(world.executor(), std::chrono::seconds(60)));
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
}

TEST(Cluster, NamesTheWorkerThatNeverCame) {
  ProcessWorld world(3);
  Process& first = world.start(0, "join_only");
  Process& second = world.start(1, "join_only");
  for (Process* process : {&first, &second}) {
    ASSERT_TRUE(process->wait(world.executor(), std::chrono::seconds(30)));
    EXPECT_EQ(process->exit_code(), 1);
    EXPECT_THAT(process->output(), HasSubstr("timed out"));
    EXPECT_THAT(process->output(), HasSubstr("rank 2"));
  }
}

TEST(Cluster, RefusesTwoWorkersWithOneNameOnBoth) {
  ProcessWorld world(2);
  Process& first = world.start(0, "join_only", {{"TORCHSPAN_NAME", "twin"}});
  Process& second = world.start(1, "join_only", {{"TORCHSPAN_NAME", "twin"}});
  for (Process* process : {&first, &second}) {
    ASSERT_TRUE(process->wait(world.executor(), std::chrono::seconds(30)));
    EXPECT_EQ(process->exit_code(), 1);
    EXPECT_THAT(process->output(), HasSubstr("twin"));
  }
}

TEST(Cluster, RefusesWorldSizesThatDoNotMatch) {
  ProcessWorld world(2);
  Process& first = world.start(0, "join_only");
  Process& second = world.start(1, "join_only", {{"WORLD_SIZE", "3"}});
  for (Process* process : {&first, &second}) {
    ASSERT_TRUE(process->wait(world.executor(), std::chrono::seconds(30)));
    EXPECT_EQ(process->exit_code(), 1);
    EXPECT_THAT(process->output(), HasSubstr("3"));
  }
}

TEST(Cluster, RefusesARankOutsideItsWorld) {
  ProcessWorld world(2);
  Process& process = world.start(5, "join_only");
  ASSERT_TRUE(process.wait(world.executor(), std::chrono::seconds(30)));
  EXPECT_EQ(process.exit_code(), 1);
  EXPECT_THAT(process.output(), HasSubstr("RANK"));
}

TEST(Cluster, SaysThatThePortIsInUse) {
  ProcessWorld world(2);
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(world.port()));
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  Process& process = world.start(0, "join_only");
  ASSERT_TRUE(process.wait(world.executor(), std::chrono::seconds(30)));
  EXPECT_EQ(process.exit_code(), 1);
  EXPECT_THAT(process.output(), HasSubstr(std::to_string(world.port())));
  EXPECT_THAT(process.output(), HasSubstr("in use"));
  close(taken);
}

}  // namespace
}  // namespace torchspan

int main(int argc, char** argv) {
  return torchspan::testing::cluster_main(
      argc, argv,
      {{"calls_work", torchspan::calls_work},
       {"remote_exception", torchspan::remote_exception},
       {"unknown_function", torchspan::unknown_function},
       {"worker_dies_during_a_call", torchspan::worker_dies_during_a_call},
       {"join_only", torchspan::join_only}});
}
