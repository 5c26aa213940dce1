#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <string>

#include <torchspan/core/observation.h>
#include <torchspan/core/preemption.h>

#include "launch/supervisor/job_fixture.h"

namespace torchspan::launch::preempted_job_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// The program of a worker in the tests below, which run it through this executable; otherwise it does nothing.
TEST(PreemptedWorker, WritesACheckpointWhenItIsPreempted) {
  if (variable("READY").empty()) return;
  const auto executor = make_executor();
  const Preemption preemption;
  Progress progress(*executor);  // uses the same pipe to the launcher
  const int ready = std::atoi(variable("READY").c_str());
  ASSERT_EQ(write(ready, "ready\n", 6), 6);
  const std::string folder = variable("FOLDER");
  std::filesystem::create_directory(folder + "/ready" + variable("SIGNAL") + variable("RANK"));
  if (variable("RANK") == variable("SIGNALLED")) {
    for (const char* rank : {"0", "1", "2"}) {
      while (!std::filesystem::exists(folder + "/ready" + variable("SIGNAL") + rank)) executor->yield();
    }
    kill(getpid(), std::atoi(variable("SIGNAL").c_str()));
  }
  pollfd wanted{preemption.descriptor(), POLLIN, 0};
  while (poll(&wanted, 1, -1) != 1) {
  }
  ASSERT_TRUE(preemption.requested());
  const std::string text = "checkpoint after signal " + std::to_string(preemption.signal()) + "\n";
  const int file = open((folder + "/rank" + variable("RANK")).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ASSERT_EQ(write(file, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  close(file);
}

class PreemptedJobs : public Jobs {
 protected:
  PreemptedJobs() {
    EXPECT_EQ(pipe(alive_.data()), 0);
    fcntl(alive_[0], F_SETFD, FD_CLOEXEC);
  }
  ~PreemptedJobs() override { close(alive_[0]); }

  /// Workers that handle preemption; with `script`, shells.
  JobOptions options(int workers, const std::string& script = "") const {
    JobOptions options = Jobs::options(workers, script);
    if (script.empty()) {
      options.command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                         "--gtest_filter=PreemptedWorker.*"};
    }
    options.extra["READY"] = std::to_string(alive_[1]);
    options.preemption.clean_code = 85;
    options.restarts.most = 3;
    return options;
  }
  /// Runs a job, sends it `signal` once all workers are ready, and returns the launcher's exit code.
  int code_after(const JobOptions& options, std::vector<int> signals) {
    const pid_t launcher = launch(options);
    wait_for_lines(options.workers);
    for (const int signal : signals) kill(launcher, signal);
    const int code = code_of(launcher);
    EXPECT_TRUE(all_gone());
    EXPECT_EQ(leftovers(), 0);
    return code;
  }
};

std::string checkpoint(int signal) { return "checkpoint after signal " + std::to_string(signal) + "\n"; }

TEST_F(PreemptedJobs, LetEveryWorkerWriteACheckpoint) {
  EXPECT_EQ(code_after(options(3), {SIGUSR1}), 85);
  for (const char* rank : {"rank0", "rank1", "rank2"}) EXPECT_EQ(file(rank), checkpoint(SIGUSR1)) << rank;
  EXPECT_THAT(errors(), AllOf(HasSubstr("SIGUSR1; the workers have 30 s to write a checkpoint and end"),
                              HasSubstr("preempted by SIGUSR1, and all workers ended with code 0"),
                              HasSubstr("exit code: 85"), Not(HasSubstr("attempt"))));
}

TEST_F(PreemptedJobs, TreatSigtermAlike) {
  EXPECT_EQ(code_after(options(2), {SIGTERM}), 85);
  for (const char* rank : {"rank0", "rank1"}) EXPECT_EQ(file(rank), checkpoint(SIGTERM)) << rank;
}

TEST_F(PreemptedJobs, IgnoreARepeatedSignal) {
  EXPECT_EQ(code_after(options(2), {SIGUSR1, SIGUSR1, SIGUSR1}), 85);
  for (const char* rank : {"rank0", "rank1"}) EXPECT_EQ(file(rank), checkpoint(SIGUSR1)) << rank;
}

TEST_F(PreemptedJobs, UseTheChosenSignal) {
  JobOptions mine = options(2);
  mine.preemption.signal = SIGUSR2;
  EXPECT_EQ(code_after(mine, {SIGUSR2}), 85);
  for (const char* rank : {"rank0", "rank1"}) EXPECT_EQ(file(rank), checkpoint(SIGUSR2)) << rank;
}

TEST_F(PreemptedJobs, ForwardASignalThatOneWorkerGot) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    JobOptions mine = options(3);
    mine.extra["SIGNALLED"] = "1";
    mine.extra["SIGNAL"] = std::to_string(signal);
    EXPECT_EQ(run(mine), 85);
    for (const char* rank : {"rank0", "rank1", "rank2"}) {
      EXPECT_THAT(file(rank), ::testing::EndsWith(checkpoint(signal))) << rank;
    }
  }
}

TEST_F(PreemptedJobs, GetTheirTimeIfAWorkerReportsTheSignalBeforeTheLauncherGetsIt) {
  EXPECT_EQ(run(options(1,
                        "trap 'sleep 0.3; echo saved; exit 0' TERM; echo torchspan-preempted 1 signal=15 "
                        ">/proc/self/fd/$TORCHSPAN_PROGRESS_FD; sleep 0.2; kill -TERM $PPID; kill -TERM $$; "
                        "while :; do sleep 0.02; done")),
            85);
  EXPECT_EQ(output(), "[worker0] saved\n");
}

TEST_F(PreemptedJobs, ForwardTheirOwnSignalForAnyOtherThatAWorkerReports) {
  EXPECT_EQ(
      run(options(
          2,
          "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; trap 'echo saved; touch $FOLDER/saved; exit 0' USR1; "
          "touch $FOLDER/ready$RANK; if [ $RANK = 0 ]; then "
          "while [ ! -e $FOLDER/ready1 ]; do sleep 0.02; done; "
          "trap 'echo again' USR1; echo torchspan-preempted 1 signal=12 >&9; while [ ! -e $FOLDER/saved ]; "
          "do sleep 0.02; done; exit 0; fi; while :; do sleep 0.02; done")),
      85);
  EXPECT_EQ(output(), "[worker1] saved\n");
}

TEST_F(PreemptedJobs, NameAWorkerThatDoesNotHandleTheSignal) {
  EXPECT_EQ(code_after(options(2, "echo ready >/dev/fd/$READY; while :; do sleep 0.02; done"), {SIGUSR1}),
            128 + SIGUSR1);
  EXPECT_THAT(errors(), AllOf(HasSubstr("the job was preempted by SIGUSR1\n"),
                              HasSubstr("was killed by SIGUSR1 (the program does not handle it")));
}

TEST_F(PreemptedJobs, KillWorkersAfterTheGracePeriod) {
  JobOptions mine = options(2, "trap '' USR1; echo ready >/dev/fd/$READY; while :; do sleep 0.02; done");
  mine.preemption.grace = milliseconds(200);
  mine.grace = seconds(1000);
  EXPECT_EQ(code_after(mine, {SIGUSR1}), 128 + SIGUSR1);
  EXPECT_THAT(errors(), HasSubstr("was killed by SIGKILL"));
}

TEST_F(PreemptedJobs, AcceptSigtermAfterTheSignal) {
  JobOptions mine = options(
      2,
      "trap 'echo saved; echo again >/dev/fd/$READY' USR1; trap 'exit 0' TERM; echo ready >/dev/fd/$READY; "
      "while :; do sleep 0.02; done");
  mine.preemption.grace = seconds(1000);
  const pid_t launcher = launch(mine);
  wait_for_lines(2);
  kill(launcher, SIGUSR1);
  wait_for_lines(2);
  kill(launcher, SIGTERM);
  EXPECT_EQ(code_of(launcher), 85);
  EXPECT_THAT(output(), AllOf(HasSubstr("[worker0] saved\n"), HasSubstr("[worker1] saved\n")));
}

TEST_F(PreemptedJobs, ReportAWorkerThatFailsMeanwhile) {
  JobOptions mine = options(2,
                            "trap 'echo disk full >&2; exit 5' USR1; [ $RANK = 0 ] || trap '' USR1; "
                            "echo ready >/dev/fd/$READY; while :; do sleep 0.02; done");
  mine.preemption.grace = seconds(1000);
  EXPECT_EQ(code_after(mine, {SIGUSR1}), 128 + SIGUSR1);
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("first failure: worker0"), HasSubstr("exited with code 5"),
                    HasSubstr("    disk full\n"), HasSubstr("worker1: stopped"), Not(HasSubstr("attempt"))));
}

}  // namespace
}  // namespace torchspan::launch::preempted_job_test
