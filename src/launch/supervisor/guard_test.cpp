#include <csignal>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <random>
#include <sys/syscall.h>

#include "launch/supervisor/job_fixture.h"
#include "launch/supervisor/processes.h"

namespace torchspan::launch::guard_test {
namespace {

using std::chrono::milliseconds;
using namespace std::string_literals;

TEST(Marks, AreFoundInAnEnvironment) {
  EXPECT_TRUE(is_marked("A=1\0TORCHSPAN_JOBS=j1\0B=2\0"s, "j1"));
  EXPECT_TRUE(is_marked("TORCHSPAN_JOBS=outer:j1:inner"s, "j1"));
  for (const std::string& block :
       {""s, "\0\0"s, "TORCHSPAN_JOBS=j11\0"s, "TORCHSPAN_JOBS=\0"s, "TORCHSPAN_JOBS=:\0"s,
        "XTORCHSPAN_JOBS=j1\0"s, "A=TORCHSPAN_JOBS=j1\0"s, "TORCHSPAN_JOBS"s}) {
    EXPECT_FALSE(is_marked(block, "j1")) << block;
  }
}

/// Jobs whose workers start processes in every way: in the background, in a new session, in a new session
/// from a process that has ended, and without the job's variables. All hold `alive_[1]`.
class Orphans : public Jobs {
 protected:
  static constexpr int kLines = 6;  ///< that each worker and its processes write

  Orphans() {
    EXPECT_EQ(pipe(alive_.data()), 0);
    fcntl(alive_[0], F_SETFD, FD_CLOEXEC);
  }
  ~Orphans() override { close(alive_[0]); }

  JobOptions options(int workers, const std::string& end = "exec sleep 1000") const {
    const std::string say = "echo started >/dev/fd/" + std::to_string(alive_[1]);
    return Jobs::options(
        workers, "exec > /dev/null 2>&1; " + say + "; sh -c '" + say + "; exec sleep 1000' & setsid sh -c '" +
                     say + "; exec sleep 1000' & (setsid sh -c '" + say +
                     "; sleep 1000; :' &) ; env -i sh -c '" + say + "; sleep 1000; :' & " + say + "; " + end);
  }
};

TEST_F(Orphans, DoNotOutliveALauncherThatIsKilled) {
  const pid_t launcher = launch(options(3));
  wait_for_lines(3 * kLines);
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(all_gone());
  EXPECT_EQ(leftovers(), 1);
  EXPECT_EQ(run(Jobs::options(1, "exit 0")), 0);
}

TEST_F(Orphans, DoNotOutliveALauncherThatIsKilledAtAnyMoment) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  close(alive_[0]);
  close(alive_[1]);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    ASSERT_EQ(pipe(alive_.data()), 0);
    fcntl(alive_[0], F_SETFD, FD_CLOEXEC);
    JobOptions mine = options(2, "[ $RANK = 0 ] || exit 3; exec sleep 1000");
    mine.restarts.most = 1000;
    mine.restarts.give_up_after = 0;
    mine.restarts.backoff = milliseconds(random() % 3);
    const pid_t launcher = launch(mine);
    const auto lines = static_cast<std::ptrdiff_t>(random() % (4 * kLines));
    if (lines > 0) {
      wait_for_lines(lines);
    } else {
      for (unsigned i = random() % 3000; i > 0; --i) executor_->yield();
    }
    kill(round % 2 == 0 ? launcher : -launcher, SIGKILL);  // the guard is not in that group
    waitpid(launcher, nullptr, 0);
    ASSERT_TRUE(all_gone());
    close(alive_[0]);
  }
  alive_[0] = -1;
  EXPECT_EQ(run(Jobs::options(1, "exit 0")), 0) << "the next job removes the folders of the killed launchers";
}

TEST_F(Orphans, DoNotOutliveAJobThatEnds) {
  const pid_t launcher = launch(options(2, "exit 0"));
  EXPECT_EQ(code_of(launcher), 0);
  EXPECT_TRUE(all_gone());
}

TEST_F(Orphans, OfAJobInsideAJobEndWithTheOuterOne) {
  JobOptions mine = options(1);
  mine.environment[kJobsVariable] = "0123456789abcdef";
  const pid_t launcher = launch(mine);
  wait_for_lines(kLines);
  kill(launcher, SIGSTOP);  // so that the inner launcher does not notice
  EXPECT_GE(processes_of("0123456789abcdef").size(), 4u);
  EXPECT_TRUE(processes_of("0123456789abcde").empty());
  EXPECT_EQ(kill_processes_of(*executor_, "0123456789abcdef"), 0u);
  EXPECT_TRUE(processes_of("0123456789abcdef").empty());
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(all_gone());
}

TEST(Guard, HasItsOwnGroupIgnoresSignalsAndEndsWithItsObject) {
  pid_t pid = -1;
  {
    const Guard guard("0123456789abcdef");
    pid = guard.pid();
    ASSERT_GT(pid, 0);
    EXPECT_GE(guard.registrations(), 0);
    EXPECT_EQ(kill(pid, 0), 0);
    EXPECT_EQ(getpgid(pid), pid) << "a signal to the launcher's group would reach the guard";
    const Descriptor watch(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) kill(pid, signal);
    pollfd ended{watch.get(), POLLIN, 0};
    EXPECT_EQ(poll(&ended, 1, 50), 0) << "a signal ended the guard";
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

}  // namespace
}  // namespace torchspan::launch::guard_test
