// Ranks as processes that are killed or stopped in the middle of a collective.
#include <csignal>
#include <gmock/gmock.h>

#include <ATen/ATen.h>

#include "tests/conformance/collective_process.h"

namespace torchspan::testing {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

/// Dies before a call that the others make.
void dies_between_calls(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor&) {
    for (int i = 0; i < 5; ++i) group.all_reduce(at::ones({100})).wait();
    if (group.rank() == kVictim) kill(getpid(), SIGKILL);
    expect_error(ErrorKind::kDisconnected, {"worker1", "rank 1", "all_reduce(Float [100], sum)", "call 6"},
                 [&] { group.all_reduce(at::ones({100})).wait(); });
    expect_error(ErrorKind::kDisconnected, {"worker1"}, [&] { group.barrier(); });
  });
}

/// Is killed from outside, at no particular time, while large tensors are on their way.
void dies_at_any_time() {
  with_group(shared_memory(), [](Group& group, Executor&) {
    at::Tensor bucket = group.allocate({1 << 20}, at::kFloat), mine = at::ones({1 << 20});
    if (group.rank() == kVictim) {
      std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/ready") << "now";
    }
    expect_error(ErrorKind::kDisconnected, {"worker1", "is gone"}, [&] {
      while (true) {
        group.all_reduce(bucket, kMaximum).wait();
        group.all_reduce(mine, kMaximum).wait();
      }
    });
  });
}

/// Is stopped: it is late, not dead.
void stops() {
  GroupOptions options = shared_memory();
  options.timeout = seconds(1);
  with_group(options, [](Group& group, Executor&) {
    group.barrier();
    if (group.rank() == kVictim) kill(getpid(), SIGSTOP);
    expect_error(ErrorKind::kTimedOut, {"worker1", "all_gather(Float [300000])", "waited"},
                 [&] { group.all_gather(at::ones({300000})).wait(); });
  });
}

void expect_survivors(const std::string& scene) {
  ProcessWorld world(3);
  world.start_all(scene);
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(world.process(rank).wait(world.executor(), seconds(60))) << "rank " << rank << " still runs";
    EXPECT_EQ(world.process(rank).exit_code(), 0) << world.process(rank).output();
  }
}

TEST(CollectiveDeaths, ARankThatDiedIsNamedWithTheCallItMissed) { expect_survivors("dies_between_calls"); }

#if defined(TORCHSPAN_GLOO)
TEST(CollectiveDeaths, ARankThatDiedUnderGlooIsNamedWithTheCallItMissed) {
  expect_survivors("dies_between_calls_of_gloo");
}
#endif

TEST(CollectiveDeaths, ARankMayDieWhileItWritesToEverybody) {
  for (int time = 0; time < 3; ++time) {
    ProcessWorld world(3);
    world.start_all("dies_at_any_time");
    const Deadline deadline = world.executor().deadline_in(seconds(60));
    while (!std::filesystem::exists(world.folder() + "/ready")) {
      ASSERT_FALSE(deadline.passed(world.executor().now()));
      world.executor().sleep(milliseconds(5));
    }
    world.executor().sleep(milliseconds(3 + 37 * time));
    world.process(kVictim).kill(SIGKILL);
    for (const int rank : {0, 2}) {
      ASSERT_TRUE(world.process(rank).wait(world.executor(), seconds(60)))
          << "rank " << rank << " still runs";
      EXPECT_EQ(world.process(rank).exit_code(), 0) << world.process(rank).output();
    }
  }
}

TEST(CollectiveDeaths, AStoppedRankIsLate) { expect_survivors("stops"); }

}  // namespace
}  // namespace torchspan::testing

int main(int argc, char** argv) {
  using namespace torchspan::testing;
  constexpr std::string_view kOverMpi = "--over-mpi=";
  if (argc > 1 && std::string_view(argv[1]).starts_with(kOverMpi)) {
    return run_over_mpi(std::atoi(argv[1] + kOverMpi.size()), argc - 1, argv + 1);
  }
  std::map<std::string, Scenario> scenarios{
      {"dies_between_calls", [] { dies_between_calls(shared_memory()); }},
      {"dies_between_calls_of_gloo",
       [] { dies_between_calls({.back_end = BackEndKind::kC10d, .timeout = std::chrono::seconds(60)}); }},
      {"dies_at_any_time", dies_at_any_time},
      {"stops", stops}};
  scenarios.merge(phase_scenarios());
  return cluster_main(argc, argv, scenarios);
}
