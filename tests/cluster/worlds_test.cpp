// Workers that stop, come back and leave, across real processes.
#include <ATen/ATen.h>

#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/errors.h"

namespace torchspan::worlds_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;
using torchspan::testing::error_of;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t pid() { return getpid(); }
void nap(Worker& worker, std::int64_t ms) { worker.runtime().executor.sleep(milliseconds(ms)); }
constexpr Function<add> kAdd{"add"};
constexpr Function<pid> kPid{"pid"};
constexpr Function<nap> kNap{"nap"};

FunctionTable functions() { return FunctionTable().add(kAdd, kPid, kNap); }

double seconds_since(Worker& worker, TimePoint start) {
  return std::chrono::duration<double>(worker.runtime().executor.now() - start).count();
}

/// A worker stops for a while: calls to it fail after five seconds, other calls continue, and so does the
/// worker afterwards.
void stopped_worker() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  if (session.rank() == 0) {
    const auto victim = static_cast<pid_t>(worker.rpc_sync("worker1", kPid));
    ::kill(victim, SIGSTOP);
    worker.runtime().executor.sleep(milliseconds(200));  // its threads stop one after another
    const TimePoint start = worker.runtime().executor.now();
    auto quick = worker.with({.timeout = milliseconds(500)}).rpc_async("worker1", kAdd, 1, 1);
    auto patient = worker.with({.timeout = seconds(60)}).rpc_async("worker1", kAdd, 1, 1);
    require(worker.rpc_sync("worker2", kAdd, 1, 1) == 2, "worker2 is not concerned");
    require(error_of([&] { quick.wait(); }).kind() == ErrorKind::kTimedOut, "the deadline holds");
    const Error error = error_of([&] { patient.wait(); });
    require(error.kind() == ErrorKind::kDisconnected, error.what());
    require(error.message().find("has been stopped") != std::string::npos, error.what());
    require(error.worker() == "worker1", error.what());
    require(seconds_since(worker, start) > 4 && seconds_since(worker, start) < 9, "after about five seconds");
    ::kill(victim, SIGCONT);
    require(worker.rpc_sync("worker1", kAdd, 40, 2) == 42, "it continues where it stopped");
  }
  session.shutdown(seconds(30));
}

/// A worker with a slow handler does not count as stopped.
void slow_handler() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 0) session.worker().rpc_sync("worker1", kNap, 7000);
  session.shutdown(seconds(30));
}

void init_twice() {
  for (int round = 0; round < 2; ++round) {
    Session session(WorkerOptions::from_env(), functions());
    Worker& worker = session.worker();
    require(worker.rpc_sync((worker.rank() + 1) % 2, kAdd, round, 1) == round + 1, "calls in every round");
    session.shutdown(seconds(30));
    require(error_of([&] { worker.rpc_sync(0, kAdd, 1, 1); }).kind() == ErrorKind::kCancelled,
            "none after shutdown");
  }
}

void wait_for(Worker& worker, int size) {
  for (int i = 0; i < 3000 && worker.world_size() != size; ++i)
    worker.runtime().executor.sleep(milliseconds(10));
  require(worker.world_size() == size, "a world of " + std::to_string(size));
}

/// Rank 0 of an open world: kills worker1, meets its successor, and sees it leave.
void open_first() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  wait_for(worker, 2);
  const auto first = worker.rpc_sync("worker1", kPid);
  auto lost = worker.rpc_async("worker1", kNap, 20'000);
  worker.rpc_sync("worker1", kAdd, 1, 1);
  const TimePoint start = worker.runtime().executor.now();
  ::kill(static_cast<pid_t>(first), SIGKILL);
  require(error_of([&] { lost.wait(); }).kind() == ErrorKind::kDisconnected, "the call is lost");
  require(seconds_since(worker, start) < 4, "at once, not after a silence of 5 s");
  const auto has_successor = [&] {
    try {
      return worker.rpc_sync("worker1", kPid) != first;
    } catch (const Error&) {
      return false;
    }
  };
  for (int i = 0; i < 3000 && !has_successor(); ++i) worker.runtime().executor.sleep(milliseconds(10));
  require(has_successor(), "another process has its place");
  require(worker.rpc_sync("worker1", kAdd, 40, 2) == 42, "and serves");
  wait_for(worker, 1);
  session.shutdown(seconds(30));
}

void open_member() {
  Session session(WorkerOptions::from_env(), functions());
  require(session.worker().rpc_sync(0, kAdd, 1, 2) == 3, "a joiner can call at once");
  require(session.worker().name() == "worker1", session.worker().name());
  session.runtime().executor.sleep(seconds(3));
  session.shutdown(seconds(30));
}

/// Gets its rank from the store.
void open_any_rank() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  require(worker.rank() >= 1, "a rank other than 0");
  require(worker.rpc_sync(0, kAdd, 1, 2) == 3, "calls");
  require(worker.rpc_sync(worker.rank(), kPid) == getpid(), "calls to itself");
  wait_for(worker, 3);  // so that nobody leaves before all have met
  session.runtime().executor.sleep(seconds(2));
  session.shutdown(seconds(30));
}

void open_host() {
  Session session(WorkerOptions::from_env(), functions());
  wait_for(session.worker(), 3);
  wait_for(session.worker(), 1);
  session.shutdown(seconds(30));
}

// peer: rpc/more calls to a stopped process fail, and name the signal that continues it: better
TEST(Worlds, DistinguishAStoppedWorkerFromADeadOne) {
  ProcessWorld world(3);
  world.start_all("worlds.stopped_worker");
  expect_all_end_well(world);
}

TEST(Worlds, WaitForASlowHandler) {
  ProcessWorld world(2);
  world.start_all("worlds.slow_handler");
  expect_all_end_well(world);
}

TEST(Worlds, CanBeJoinedAgainByTheSameProcesses) {
  ProcessWorld world(2);
  world.start_all("worlds.init_twice");
  expect_all_end_well(world);
}

// peer: rpc_test.py dynamic_rpc_init_rpc
// peer: rpc/more a killed worker can be restarted under its name
TEST(Worlds, ReadmitAKilledWorker) {
  ProcessWorld world(2);
  const std::map<std::string, std::string> open{{"WORLD_SIZE", "0"}, {"LOCAL_WORLD_SIZE", "0"}};
  auto& first = world.start(0, "worlds.open_first", open);
  auto& killed = world.start(1, "worlds.open_member", open);
  ASSERT_TRUE(killed.wait(world.executor(), seconds(60)));
  EXPECT_EQ(killed.exit_code(), 128 + SIGKILL) << killed.output();
  auto& next = world.start(1, "worlds.open_member", open);
  ASSERT_TRUE(next.wait(world.executor(), seconds(60)));
  EXPECT_EQ(next.exit_code(), 0) << next.output();
  ASSERT_TRUE(first.wait(world.executor(), seconds(60)));
  EXPECT_EQ(first.exit_code(), 0) << first.output();
}

// peer: rpc_test.py dynamic_rpc_init_rpc_without_rank: differs: the store gives the next free rank to a named
//   worker; a worker without rank and name is rejected
TEST(Worlds, AssignRanksToWorkersThatNameNone) {
  ProcessWorld world(3);
  world.start(0, "worlds.open_host", {{"WORLD_SIZE", "0"}});
  for (const char* name : {"anna", "bert"})
    world.start(1, "worlds.open_any_rank", {{"WORLD_SIZE", "0"}, {"RANK", ""}, {"TORCHSPAN_NAME", name}});
  expect_all_end_well(world);
}

const testing::Scenarios kScenarios("worlds", {{"stopped_worker", stopped_worker},
                                               {"slow_handler", slow_handler},
                                               {"init_twice", init_twice},
                                               {"open_first", open_first},
                                               {"open_member", open_member},
                                               {"open_any_rank", open_any_rank},
                                               {"open_host", open_host}});

}  // namespace
}  // namespace torchspan::worlds_test
