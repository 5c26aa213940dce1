#include <gmock/gmock.h>
#include <map>
#include <set>

#include "launch/supervisor/nodes_fixture.h"

namespace torchspan::launch::restarted_nodes_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class RestartedNodes : public NodesOnLoopback {};

/// The worker of $VICTIM fails in the first attempt, in which the others would run for a minute.
const std::string kFailOnce = R"(
  echo "$TORCHSPAN_RESTART_COUNT $RANK of $WORLD_SIZE" >> $FOLDER/ran
  echo "$TORCHSPAN_RESTART_COUNT $MASTER_ADDR $MASTER_PORT" >> $FOLDER/stores
  if [ $TORCHSPAN_RESTART_COUNT = 0 ]; then
    if [ $RANK = $VICTIM ]; then
      while [ $(wc -l < $FOLDER/stores) -lt 4 ]; do sleep 0.01; done
      exit 7
    fi
    exec sleep 60
  fi)";

TEST_F(RestartedNodes, AFailureOnEitherHostRestartsTheWorkersOfBoth) {
  for (const int victim : {0, 3}) {
    SCOPED_TRACE(victim);
    for (const char* name : {"/ran", "/stores"}) std::filesystem::remove(folder_ + name);
    for (int rank = 0; rank < kNodes; ++rank) {
      JobOptions job = node(rank, kFailOnce);
      job.environment["VICTIM"] = std::to_string(victim);
      start(job);
    }
    for (int rank = 0; rank < kNodes; ++rank) {
      EXPECT_EQ(code(rank), 0) << errors_of(rank);
      EXPECT_THAT(errors_of(rank), HasSubstr("attempt 1 failed: host " + std::to_string(victim / 2)));
      EXPECT_THAT(errors_of(rank),
                  HasSubstr("worker" + std::to_string(victim) + " (rank " + std::to_string(victim)));
      EXPECT_THAT(errors_of(rank), HasSubstr("exited with code 7"));
      EXPECT_THAT(errors_of(rank), HasSubstr("attempt 2 succeeded"));
    }
    EXPECT_THAT(lines("ran"), ElementsAre("0 0 of 4", "0 1 of 4", "0 2 of 4", "0 3 of 4", "1 0 of 4",
                                          "1 1 of 4", "1 2 of 4", "1 3 of 4"));
    const auto stores = lines("stores");
    EXPECT_EQ(std::set(stores.begin(), stores.end()).size(), 2u) << "one store in each attempt";
    EXPECT_THAT(stores[0], Not(HasSubstr(std::to_string(port_)))) << "there the launchers meet";
  }
}

TEST_F(RestartedNodes, AHostThatHasSucceededStartsAgainToo) {
  start_both(R"(
    echo "$TORCHSPAN_RESTART_COUNT $RANK" >> $FOLDER/ran
    if [ $TORCHSPAN_RESTART_COUNT = 0 -a $RANK = 1 ]; then
      while [ $(wc -l < $FOLDER/ran) -lt 4 ]; do sleep 0.01; done
      sleep 0.5
      exit 7
    fi)");
  for (int rank = 0; rank < kNodes; ++rank) EXPECT_EQ(code(rank), 0) << errors_of(rank);
  EXPECT_THAT(lines("ran"), ElementsAre("0 0", "0 1", "0 2", "0 3", "1 0", "1 1", "1 2", "1 3"));
}

TEST_F(RestartedNodes, BothEndWithTheFailureWhenNoRestartIsLeft) {
  start_both(R"(
    echo $RANK >> $FOLDER/ran
    if [ $RANK = 2 ]; then
      while [ $(wc -l < $FOLDER/ran) -lt $((4 * (TORCHSPAN_RESTART_COUNT + 1))) ]; do sleep 0.01; done
      exit 7
    fi
    exec sleep 60)",
             1);
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_EQ(code(rank), 7) << errors_of(rank);
    EXPECT_THAT(errors_of(rank), HasSubstr("host 1"));
    EXPECT_THAT(errors_of(rank), HasSubstr("worker2 (rank 2"));
    EXPECT_THAT(errors_of(rank), HasSubstr("no restart is left (--max-restarts 1)"));
  }
  EXPECT_THAT(lines("ran").size(), 8);
}

TEST_F(RestartedNodes, NeitherStartsAProgramAgainThatCannotBeRun) {
  start_both("if [ $RANK = 3 ]; then exit 127; fi; exec sleep 60");
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_EQ(code(rank), 127) << errors_of(rank);
    EXPECT_THAT(errors_of(rank), HasSubstr("so it is not started again"));
  }
}

TEST_F(RestartedNodes, TheDeathOfALauncherEndsTheJobAndLeavesNoProcess) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(victim);
    std::filesystem::remove(folder_ + "/ran");
    if (alive_[1] < 0) {
      ASSERT_EQ(pipe(alive_.data()), 0);
    }
    start_both("echo $RANK >> $FOLDER/ran; sleep 60 & wait");
    wait_for_lines_of("ran", 4);
    kill(launchers_[static_cast<std::size_t>(victim)], SIGKILL);
    const TimePoint killed = executor_->now();
    EXPECT_EQ(code(victim), -1);
    EXPECT_EQ(code(1 - victim), 1) << errors_of(1 - victim);
    EXPECT_LT(executor_->now() - killed, seconds(15));
    EXPECT_THAT(errors_of(1 - victim), HasSubstr("launcher" + std::to_string(victim)));
    EXPECT_THAT(errors_of(1 - victim), HasSubstr("not started again"));
    EXPECT_TRUE(all_gone()) << "a process of a worker is left";
    close(alive_[0]);
  }
  ASSERT_EQ(pipe(alive_.data()), 0);
  close_own_end();
}

TEST_F(RestartedNodes, ASignalToOneLauncherIsOneToAll) {
  start_both("trap 'echo $RANK >> $FOLDER/saved; exit 0' TERM; echo $RANK >> $FOLDER/ran; sleep 60 & wait");
  wait_for_lines_of("ran", 4);
  kill(launchers_[1], SIGTERM);
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_EQ(code(rank), 0) << errors_of(rank);
    EXPECT_THAT(errors_of(rank), HasSubstr("the job was preempted by SIGTERM"));
  }
  EXPECT_THAT(lines("saved"), ElementsAre("0", "1", "2", "3"));
}

/// As a batch system sends it: the launcher of host 0 has heard of it from that of host 1 before it gets it itself.
TEST_F(RestartedNodes, ASignalToAllLaunchersIsOne) {
  start_both(
      "trap 'sleep 0.5; echo $RANK >> $FOLDER/saved; exit 0' TERM; echo $RANK >> $FOLDER/ran; "
      "while :; do sleep 0.02; done");
  wait_for_lines_of("ran", 4);
  kill(launchers_[1], SIGTERM);
  while (errors_of(0).find("the workers have") == std::string::npos) executor_->sleep(milliseconds(5));
  kill(launchers_[0], SIGTERM);
  for (int rank = 0; rank < kNodes; ++rank) EXPECT_EQ(code(rank), 0) << errors_of(rank);
  EXPECT_THAT(lines("saved"), ElementsAre("0", "1", "2", "3"));
}

TEST_F(RestartedNodes, SayWhichHostDoesNotStart) {
  for (const int present : {0, 1}) {
    JobOptions job = node(present, "exit 0");
    job.environment["TORCHSPAN_JOIN_TIMEOUT"] = "1";
    start(job);
    EXPECT_EQ(code(present), 2) << errors_of(present);
    EXPECT_THAT(errors_of(present),
                present == 0 ? HasSubstr("did not join within 1 s: 1") : HasSubstr("host 0"));
  }
}

TEST_F(RestartedNodes, ALauncherThatWaitsForTheOthersHandlesSignals) {
  JobOptions job = node(0, "exit 0");
  start(job);
  while (leftovers() == 0)
    executor_->sleep(milliseconds(5));  // the job's folder, which it makes before it waits
  kill(launchers_[0], SIGINT);
  EXPECT_EQ(code(0), 130) << errors_of(0);
  EXPECT_THAT(errors_of(0), HasSubstr("before attempt 1"));
}

TEST_F(RestartedNodes, RejectDifferentOptions) {
  start(node(0, "exit 0", 3));
  start(node(1, "exit 0", 4));
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_EQ(code(rank), 2) << errors_of(rank);
    EXPECT_THAT(errors_of(rank), HasSubstr("--max-restarts 3"));
    EXPECT_THAT(errors_of(rank), HasSubstr("--max-restarts 4"));
  }
}

}  // namespace
}  // namespace torchspan::launch::restarted_nodes_test
